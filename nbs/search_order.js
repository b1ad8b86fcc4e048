// What Sphinx's search finds: results and checks first, the inside of the package last. A page whose folder or name
// begins with a word of the query is what was asked for. What is shown of a page is its text, without menus and code.
var Scorer = {
  score: function (result) {
    const page = result[0], score = result[4];
    const words = (new URLSearchParams(location.search).get("q") || "").toLowerCase().split(/\W+/).filter(w => w);
    const isNamed = page.split("/").some(part => words.some(word => part.startsWith(word)));
    const isResult = page.includes("/experiments/") || page === "budgets/claims";
    if (page.startsWith("api/")) return score - 60;
    if (/^(site|training)\//.test(page)) return score - 30;
    if (isResult) return score + (isNamed ? 95 : 15);
    if (/^(index|explorer|ways\/(?!reference))/.test(page)) return score + 10;
    return score + (/^(papers|audits)\//.test(page) ? 10 : 0) + (isNamed ? 30 : 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 40, partialTitle: 20, term: 5, partialTerm: 2
};
if (typeof Search !== "undefined") {
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const main = page.querySelector('[role="main"]'), article = page.querySelector(".bd-article");
    if (main && article) main.replaceChildren(article);
    page.querySelectorAll(".cell_input, .toctree-wrapper, summary, script, svg").forEach(part => part.remove());
    return textOf(page.documentElement.outerHTML, anchor);
  };
}
