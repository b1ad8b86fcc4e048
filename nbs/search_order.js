// The order of what Sphinx's search finds: results and checks first, the inside of the package last.
var Scorer = {
  score: function (result) {
    const page = result[0], score = result[4];
    if (page.startsWith("api/")) return score - 60;
    if (page.startsWith("site/") || page.startsWith("training/")) return score - 30;
    if (/^(index|explorer|ways\/)/.test(page)) return score + 30;
    if (page.includes("/experiments/") || page === "budgets/claims") return score + 30;
    if (page.startsWith("papers/") || page.startsWith("audits/")) return score + 10;
    return score;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2
};
