"The site of all pages, as somebody opens it."
import shutil
import subprocess

import pytest

from test_site import needs_browser, page_problems, real_site, serve

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_browser]


def test_every_page_of_the_real_site_is_sound(browser, tmp_path):
    assert page_problems(real_site(tmp_path), browser) == []


FIRST = {"epsilon": "budgets/claims", "step decay": "papers/decay_at_equal_epsilon/experiments/",
         "SAD": "papers/sad/experiments/", "sanitization": "papers/sanitization/experiments/",
         "clipping": "algorithms/clipping", "audit": "audits/"} # what a query finds first
FOUND = """[...document.querySelectorAll('#search-results > ul > li')].slice(0, 8).map(e =>
  [e.querySelector('a').getAttribute('href'), (e.querySelector('p.context') || e).innerText])"""


def test_search_finds_results_before_internals_and_shows_text(browser, tmp_path):
    with serve(real_site(tmp_path)) as address:
        for query, first in FIRST.items():
            browser.view(1280)
            browser.open(f"{address}/search.html?q={query.replace(' ', '+')}", settle=3)
            found = browser.evaluate(FOUND)
            assert len(found) == 8 and found[0][0].startswith(first), (query, found)
            assert not any(page.startswith(("api/", "site/")) for page, _ in found), query
            for page, text in found:
                for menu in ("Contents", "Light Dark", "Show the code", "import "):
                    assert menu not in text, (query, page, text)


ON_SCREEN = """[...document.querySelectorAll('table:has(.word) tbody tr')]
  .filter(row => row.getBoundingClientRect().bottom <= 900)
  .map(row => ({ text: row.innerText,
                 words: [...row.querySelectorAll('.word')].map(w => w.innerText),
                 links: [...row.querySelectorAll('.word a')].map(a => a.getAttribute('href')) }))"""


def test_the_first_screen_says_what_holds_and_where_to_click(browser, tmp_path):
    from dp_companion.site.scorecard import scorecard
    site = real_site(tmp_path)
    with serve(site) as address:
        browser.view(1400)
        browser.open(f"{address}/index.html")
        rows = browser.evaluate(ON_SCREEN)
        ruler = browser.evaluate("document.querySelector('.ruler').getBoundingClientRect().bottom")
    assert len(rows) == 4 and ruler < 900
    for row, line in zip(rows, scorecard()):
        assert line.paper in row["text"] and line.reason in row["text"]
        assert row["words"] == [line.answer, line.accuracy.answer]
        assert all((site/link).is_file() for link in row["links"])


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    "axe-core's source, by npm; skips where npm cannot fetch it."
    folder, npm = tmp_path_factory.mktemp("axe"), shutil.which("npm")
    if npm is None: pytest.skip("no npm, so axe-core cannot be fetched")
    done = subprocess.run([npm, "install", "--silent", "--prefix", folder, "axe-core@4"],
                          check=False, capture_output=True, timeout=120)
    source = folder/"node_modules/axe-core/axe.min.js"
    if done.returncode or not source.is_file(): pytest.skip("npm does not fetch axe-core")
    return source.read_text(encoding="utf-8")


@pytest.mark.parametrize("dark", [False, True])
def test_pages_have_no_serious_accessibility_fault(browser, axe, tmp_path, dark):
    found = []
    with serve(real_site(tmp_path)) as address:
        browser.view(1400, dark=dark)
        for page in ("index", "explorer", "ways/results", "budgets/claims", "budgets/tcdp"):
            browser.open(f"{address}/{page}.html")
            browser.evaluate(axe)
            found += browser.evaluate(
                "axe.run(document.querySelector('.bd-article')).then(r => r.violations"
                ".filter(v => ['serious', 'critical'].includes(v.impact))"
                f".flatMap(v => v.nodes.map(n => '{page} ' + v.id + ' ' + n.html.slice(0, 120))))")
    assert found == []
