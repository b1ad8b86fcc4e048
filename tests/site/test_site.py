"The site: built whole or not at all, with pages that a real browser does not complain about."
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

import pytest

from dp_companion.figures import figure
from dp_companion.papers.verdicts import Difference, forest
from dp_companion.site.drafts import read_inputs
from dp_companion.site.pages import SiteError
from dp_companion.site.site import _inputs_hash, build_site

REPO = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
                None)
needs_browser = pytest.mark.skipif(CHROMIUM is None,
                                   reason="no chromium on the PATH, so no page can be opened in a "
                                   "browser")


# --- A small site -----------------------------------------------------------------------------

ONE_PIXEL = ("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
             "awAAAABJRU5ErkJggg==")


def forest_output():
    "What a notebook keeps of a forest plot of two panels."
    with mock.patch("IPython.display.display") as display:
        gap = Difference(label="ours − theirs, the usual noise, ε = 3", mean=1, half=2, seeds=3)
        forest({"MNIST, class 8 rare (reference)": [gap]*3, "digits": [gap]}, xlabel="points")
    svg = display.call_args[0][0].data
    return {"output_type": "display_data", "metadata": {}, "data": {"image/svg+xml": svg}}


def figure_output(panels):
    "What a notebook keeps of a figure."
    with (mock.patch("IPython.display.display") as display,
          mock.patch("matplotlib.pyplot.get_backend", return_value="inline"),
          figure("epoch", "loss (nats)", panels=panels, width=7 if panels == 1 else 9) as axes):
        for ax in [axes] if panels == 1 else axes:
            ax.plot([1, 2, 3], [2, 1, .5], label="step decay")
            ax.legend(fontsize=5)
    return {"output_type": "display_data", "metadata": {},
            "data": {"image/svg+xml": display.call_args[0][0].data}}


INDEX = ["# Toy\n\n> Two pages with $x$.", "See [the limits](budgets/toy.ipynb#what-s-left), "
         "`half`, @eq-half and @fig-half, and [the settings](../settings.ini)."]
TOY = [("#| default_exp budgets.toy",), "# Halves\n\n> Half of everything.",
       ("#| export\nimport math",),
       "## Claim\n\n> With $x>0$ it holds that\n> $$ h(x) = \\begin{cases}\\frac{x}{2} & x > 0\\\\ "
       "0 & \\text{else}\\end{cases} $$ {#eq-half}\n\nSee @eq-half.",
       "::: {.callout-note}\nA note.\n:::", ("#| export\ndef half(\n    x:float, # What to "
           "halve\n)->float: # Half of it\n    'Half of `x`.'\n    return x/2",),
       ("#| hide\nsecret = 1",), "## What's left\n\n" + "$$" + " + ".join(f"x_{{{i}}}"
           for i in range(60)) + "$$",
       ("#| label: fig-half\n#| fig-cap: Half of it, by @eq-half.\n#| code-fold: true\nplot()", [
           {"output_type": "display_data", "metadata": {}, "data": {"image/png": ONE_PIXEL}},
           {"output_type": "stream", "name": "stderr", "text": ["/home/me/x.py: UserWarning"]}]),
       ("#| label: fig-forest\n#| fig-cap: Two panels.\nforest()", [forest_output()]),
       ("one()", [figure_output(1)]), ("three()", [figure_output(3)])]


def write_notebook(path, cells, **metadata):
    "A notebook of `cells`: a string is Markdown, a tuple is code and perhaps its outputs."
    made = [{"cell_type": "markdown", "metadata": {}, "source": cell} if isinstance(cell, str) else
            {"cell_type": "code", "metadata": {}, "execution_count": None, "source": cell[0],
             "outputs": [*cell[1:], []][0]} for cell in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": made, "metadata": metadata, "nbformat": 4,
                                "nbformat_minor": 4}))


def make_clone(tmp_path):
    "A repository with two notebooks, one module, and the looks of this one."
    contents = [{"section": "Start here", "contents": ["index.ipynb", "not_yet.ipynb"]},
                {"section": "Budgets", "contents": ["budgets/toy.ipynb"]},
                {"section": "API", "contents": "api/*.md"}]
    (tmp_path/"_quarto.yml").write_text(json.dumps({"project": {"type": "website"},
        "website": {"title": "toy", "sidebar": {"contents": contents}}}))
    (tmp_path/"settings.ini").write_text("[DEFAULT]\nlib_path = toy\nauthor = Ada\n")
    (tmp_path/"toy/budgets").mkdir(parents=True)
    (tmp_path/"toy/budgets/toy.py").write_text("def half(\n    x:float, # What to halve\n)->float: "
        "# Half of it\n    'Half of `x`.'\n")
    write_notebook(tmp_path/"nbs/index.ipynb", INDEX)
    write_notebook(tmp_path/"nbs/budgets/toy.ipynb", TOY)
    (tmp_path/"nbs/budgets/toy.js").write_text("document.body.dataset.toy = 'ran';\n\n")
    for name in ("nbs/styles.css", "nbs/favicon.svg", "nbs/copy_buttons.js",
                 "nbs/search_order.js", "CITATION.cff"):
        shutil.copyfile(REPO/name, tmp_path/name)
    return tmp_path


@pytest.fixture
def clone(tmp_path):
    return make_clone(tmp_path)


@pytest.fixture(autouse=True)
def without_quarto(monkeypatch):
    monkeypatch.setattr("dp_companion.site.site.shutil.which", lambda name: None)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    "The small site, built once for the tests that only look at it."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dp_companion.site.site.shutil.which", lambda name: None)
        return build_site("nbs", root=make_clone(tmp_path_factory.mktemp("clone")))


def build(clone, notebooks="nbs"):
    return build_site(notebooks, root=clone)


def beside(clone):
    "Names in the top folder that a build should not leave there."
    return sorted(path.name for path in clone.iterdir() if path.name.startswith("._site"))


# --- A browser --------------------------------------------------------------------------------

@contextmanager
def serve(folder):
    "Serve a folder on this machine; yields its address."
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try: yield f"http://127.0.0.1:{server.server_port}"
    finally: server.shutdown(), server.server_close()


class Browser:
    "One tab of a headless chromium, driven by the DevTools protocol."
    FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--remote-allow-origins=*",
             "--remote-debugging-port=0")

    def __init__(self, profile):
        websocket = pytest.importorskip("websocket",
            reason="no websocket-client, so no browser can be driven")
        self.process = subprocess.Popen([CHROMIUM, *self.FLAGS, f"--user-data-dir={profile}",
            "about:blank"], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        port, deadline = Path(profile)/"DevToolsActivePort", time.monotonic()+60
        while not (port.is_file() and port.read_text().count("\n")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.skip("chromium does not start on this machine")
            time.sleep(0.05)
        with urllib.request.urlopen(
                f"http://127.0.0.1:{port.read_text().split()[0]}/json/list") as answer:
            tab = next(target for target in json.load(answer) if target["type"] == "page")
        self.socket, self.count, self.events = websocket.create_connection(
            tab["webSocketDebuggerUrl"], timeout=60), 0, []
        for domain in ("Page", "Runtime", "Log", "Network"): self.call(f"{domain}.enable")
        self.call("Network.setCacheDisabled", cacheDisabled=True)

    def close(self):
        self.process.terminate()
        self.process.wait(30)

    def call(self, method, **params):
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while (message := json.loads(self.socket.recv())).get("id") != self.count:
            self.events.append(message)
        if "error" in message: raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def evaluate(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True)
        if "exceptionDetails" in answer: raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def open(self, url, settle=0.15):
        "Open a page and wait until it is loaded and quiet; `events` has what happened."
        self.events = []
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self.socket.recv()))
        self.evaluate(f"new Promise(done => setTimeout(done, {int(1000*settle)}))")

    def view(self, width, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def screenshot(self, path):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True,
                         clip={**size, "scale": 1})
        Path(path).write_bytes(base64.b64decode(shot["data"]))


def complaints(event, host):
    "What one event of the browser says against a page."
    method, said = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
        yield f"exception {said['exceptionDetails'].get('exception', {}).get('description', said)}"
    if method == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
        yield f"console error {[arg.get('value', arg.get('description')) for arg in said['args']]}"
    if method == "Log.entryAdded" and said["entry"]["level"] == "error":
        yield f"console error {said['entry']['text']} {said['entry'].get('url', '')}"
    if method == "Network.requestWillBeSent":
        url = urlsplit(said["request"]["url"])
        if url.scheme not in ("data", "blob", "about") and url.netloc != host:
            yield f"request to another host {said['request']['url']}"


SCROLLERS = """[...document.querySelectorAll('.bd-article pre, .bd-article table, .cell_output')]
  .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)
  .map(e => `${e.tagName} ${e.scrollWidth - e.clientWidth} ${e.innerText.slice(0, 50)}`)"""
CUT = """[...document.querySelectorAll('.bd-article img, .bd-article svg')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.alt || e.getAttribute('aria-label') || e.src)"""
SMALL = """[...document.querySelectorAll('.bd-article svg text')].filter(t => t.checkVisibility())
  .map(t => [t.textContent, parseFloat(getComputedStyle(t).fontSize)
    *Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b)])
  .filter(([text, pixels]) => pixels < 12).map(([text, pixels]) =>
    `${pixels.toFixed(1)} ${text}`)"""
COLLECT = """({
  anchors: [...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name),
  links: [...document.querySelectorAll('[href], [src]')].map(e => e.href || e.src)
    .filter(u => typeof u === 'string'),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth })"""


def page_problems(folder, browser):
    "Open every page, wide and as on a phone: complaints of the browser, links that lead nowhere."
    folder, problems, pages = Path(folder), [], {}
    files = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*.html"))]
    with serve(folder) as address:
        host = urlsplit(address).netloc
        for page in [file for file in files if not file.startswith(("_static/", "_files/",
                "site_libs/"))]:
            browser.view(1280)
            browser.open(f"{address}/{page}")
            problems += [f"{page}: {text}" for event in browser.events for text in complaints(event,
                host)]
            browser.view(1400)
            problems += [f"{page}: scrolls sideways: {said}"
                         for said in browser.evaluate(SCROLLERS)]
            browser.view(390)
            problems += [f"{page}: cut on a phone: {said}" for said in browser.evaluate(CUT)]
            problems += [f"{page}: text below 9 points on a phone: {said}"
                         for said in browser.evaluate(SMALL)]
            pages[page] = browser.evaluate(COLLECT)
            if pages[page]["overflow"] > 0:
                problems.append(f"{page}: {pages[page]['overflow']} pixels wider than a phone")
        for page, found in pages.items():
            for url in dict.fromkeys(found["links"]):
                parts = urlsplit(url)
                if parts.netloc != host: continue
                path = unquote(parts.path).strip("/")
                target = f"{path}/index.html".lstrip("/") if (folder/path).is_dir() else path
                if not (folder/target).is_file(): problems.append(f"{page}: broken link {url}")
                elif "=" in parts.fragment: continue # a setting of the explorer, not a place
                elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[
                        target]["anchors"]:
                    problems.append(f"{page}: broken link {url}, no such place")
    assert pages, f"no page in {folder}"
    return problems


@pytest.mark.browser
@needs_browser
def test_every_page_of_a_small_site_is_sound(built, browser):
    assert page_problems(built, browser) == []
    with serve(built) as address:
        browser.view(1280)
        browser.open(f"{address}/search.html?q=halves", settle=2)
        found = browser.evaluate("document.querySelector('#search-results').innerText")
        assert "Half of everything." in found and "Contents" not in found # text, no menu
        browser.open(f"{address}/budgets/toy.html")
        assert browser.evaluate("document.querySelectorAll('math').length") >= 3
        assert browser.evaluate("document.body.dataset.toy") == "ran"
        assert browser.evaluate("document.querySelectorAll('.copy-code').length") >= 1
        brightness = ("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, "
                      "3).reduce((a, b) => a + +b, 0)")
        light = browser.evaluate(brightness)
        browser.view(1280, dark=True)
        browser.open(f"{address}/budgets/toy.html")
        assert browser.evaluate(brightness) < 200 and light > 600


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
def test_a_phone_stacks_the_panels_of_a_forest_plot(built, browser):
    script = """[...document.querySelectorAll('.panels > svg:not(.part)')]
        .map(e => e.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"""
    with serve(built) as address:
        browser.view(1400)
        browser.open(f"{address}/budgets/toy.html")
        (_, top, right, _), (left, top_2, *_) = browser.evaluate(script)
        assert top == top_2 and right < left
        browser.view(390)
        (left, _, right, bottom), (left_2, top_2, right_2, _) = browser.evaluate(script)
        assert left == left_2 and bottom < top_2 and max(right, right_2) <= 390
        assert min(right - left, right_2 - left_2) > 320


@pytest.mark.slow
@pytest.mark.browser
@needs_browser
def test_figure_has_a_phone_layout_and_text_of_9_points(built, browser):
    script = """[...document.querySelectorAll('.panels > .part')].filter(e => e.checkVisibility())
        .map(e => [e.classList[2] || 'panel', e.getBoundingClientRect()])
        .map(([kind, box]) => [kind, box.width, box.top])"""
    with serve(built) as address:
        found = {}
        for width in (1400, 390):
            browser.view(width)
            browser.open(f"{address}/budgets/toy.html")
            assert browser.evaluate(SMALL) == []
            found[width] = browser.evaluate(script)
    assert [kind for kind, *_ in found[1400]] == ["wide", *["panel"]*3]
    assert [kind for kind, *_ in found[390]] == ["narrow", *["panel"]*3]
    assert found[1400][0][1] > 600 > 390 > found[390][0][1] >= 320
    assert [len({top for *_, top in found[width][1:]}) for width in found] == [1, 3] # stacked


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("html, complaint", [
    ("<script>nonsense()</script>", "exception ReferenceError"),
    ("<script>console.error('oh no')</script>", "console error ['oh no']"),
    ("<a href='gone.html'>x</a>", "broken link"),
    ("<a href='#gone'>x</a>", "no such place"),
    ("<img src='gone.png'>", "console error Failed to load resource"),
    ("<script src='https://cdn.example/x.js'></script>",
     "request to another host https://cdn.example/x.js"),
    ("<style>@font-face {font-family: f; src: url('http://fonts.example/f.woff')} "
     "p {font-family: f}</style><p>x</p>", "request to another host http://fonts.example"),
    ("<script>fetch('http://127.0.0.1:9/x').catch(() => 0)</script>",
     "request to another host http://127.0.0.1:9/x"),
    ("<p style='width: 900px'>x</p>", "wider than a phone"),
    ("<div class=bd-article><svg width=300 viewBox='0 0 600 20'><text y=9 font-size=20>x</text>"
     "</svg></div>", "text below 9 points on a phone: 10.0 x"),
])
def test_a_broken_page_is_caught(tmp_path, browser, html, complaint):
    head = ("<!doctype html><meta name=viewport content='width=device-width, "
            "initial-scale=1'><link rel=icon href='data:,'>")
    (tmp_path/"index.html").write_text(f"{head}<h1 id=top>x</h1><a href='#top'>x</a>")
    assert page_problems(tmp_path, browser) == []
    (tmp_path/"index.html").write_text(head + html)
    assert any(complaint in problem for problem in page_problems(tmp_path, browser))


def real_site(tmp_path):
    "The site as `make reproduce` left it, else from the notebooks as they are committed."
    site = REPO/"_site"
    if (site/"index.html").is_file(): return site
    return build_site(REPO/"nbs", tmp_path/"_site", root=REPO)


# --- What is on a page ------------------------------------------------------------------------

def test_a_page_says_what_its_notebook_says(built):
    page, index, api = [(built/name).read_text() for name in ("budgets/toy.html", "index.html",
        "api/budgets.toy.html")]
    for text in ('id="eq-half"', '<span class="eqno">(1)</span>', 'href="#eq-half">Equation 1</a>',
                 'id="fig-half"', "Figure 1.", "admonition note", "def</span>"):
        assert text in page, text
    for text in ("#|", "default_exp", "secret", "import</span>", "UserWarning", "mathjax.js",
                 "MathJax", "{#", ":::", "callout"):
        assert text not in page, text
    for text in ("budgets/toy.html#what-s-left", "api/budgets.toy.html#half",
                 "budgets/toy.html#eq-half", "_files/settings.ini", "How to cite"):
        assert text in index, text
    for text in ("What to halve", "Half of it", 'id="half"', "../budgets/toy.html"):
        assert text in api, text
    downloaded = json.loads((built/"_sources/budgets/toy.ipynb").read_text())
    assert "_sources/budgets/toy.ipynb" in page
    assert downloaded["cells"][0]["source"] == "#| default_exp budgets.toy"
    assert "/home/me" not in json.dumps(downloaded)


BOX = """::: {.callout-tip title="Holds"}
- A half is less (Table 1); a third, too: by 3 points (thick MNIST, certified noise)
- The sum is one: yes (MNIST (reference))
- No noise: yes (MNIST (digits))
:::

::: {.callout-important title="Refuted"}
- All is noise: no (digits)
- All is signal: no (digits)
:::

Digits: 3 seeds."""


def test_the_reference_explains_what_a_user_types():
    from dp_companion.site.reference import api_pages
    pages = api_pages(REPO/"dp_companion")
    engine, names = pages["api/algorithms.privacy_engine"]
    assert {"PrivacyEngine.make_private", "PrivacyEngine.make_private_with_epsilon"} <= {*names}
    entry = engine.partition("### `PrivacyEngine.make_private`")[2].partition("\n### ")[0]
    rows = [row.split(" | ") for row in entry.splitlines() if row.startswith("| `")]
    assert len(rows) > 10 and all(len(meaning) > 10 for _, meaning in rows)
    users = r"api/(budgets|audits)\.|api/algorithms\.(clipping|privacy_engine|private_optimizer"
    for page in filter(re.compile(users + r"|private_module|sanitization)$").match, pages):
        assert not re.findall(r"^\| `[^`]*` \|  \|$", pages[page][0], re.M), page


@pytest.mark.slow
def test_terms_are_explained_once_and_a_page_names_its_origin(clone):
    page = "papers/toy/experiments/halves"
    quarto = json.loads((clone/"_quarto.yml").read_text())
    quarto["website"]["sidebar"]["contents"][0]["contents"] += [
        f"{page}.ipynb", "papers/toy/verdicts.ipynb", "glossary.ipynb"]
    (clone/"_quarto.yml").write_text(json.dumps(quarto))
    (clone/"settings.ini").write_text("[DEFAULT]\nlib_path = toy\nauthor = Ada\nbranch = main\n"
                                      "git_url = https://host.example/toy\n")
    for data in ("mnist", "thick_mnist"): (clone/"results/toy"/data).mkdir(parents=True)
    (clone/"results/index.csv").write_text("paper,file\n")
    box = {"output_type": "display_data", "metadata": {}, "data": {"text/markdown": BOX}}
    write_notebook(clone/"nbs/glossary.ipynb", ["# Words", ('terms = [("Audit", "x", "An <b>.")]',),
                                                "An audit."])
    write_notebook(clone/f"nbs/{page}.ipynb", ["# An audit", "One audit, `audit`, two audits.",
                                               ("box = verdict_box\nsums_up\nverdict_box("
        "['The sum is one'])", [box]), "The rest."])
    write_notebook(clone/"nbs/papers/toy/verdicts.ipynb", [
        "# Judges", "## Halves and thirds", ('CLAIMS = {"A half is less "\n  "(Table 1)": 0}',),
        "## Sums", ("def sums_up(\n    runs, # Records (all)\n)->tuple: # (answer, why)\n    1",)])
    out = build(clone)
    text = (out/f"{page}.html").read_text()
    assert 'One <abbr title="An &lt;b&gt;.">audit</abbr>, ' in text and text.count("<abbr") == 1
    assert "<abbr" not in (out/"glossary.html").read_text()
    assert f"--only</span> <span class=\"pre\">{page}" in text
    assert "../../../_files/results/index.csv" in text
    assert f"https://host.example/toy/edit/main/nbs/{page}.ipynb" in text
    items = [" ".join(item.split()) for item in re.findall("<li>(.*?)</li>", text, re.S)]
    links = [dict((name, url) for url, name in re.findall('href="(.*?)">(\\w+)</a>', item))
             for item in items if "derivation" in item]
    runs = "https://host.example/toy/tree/main/results/toy"
    assert links == [
        {"derivation": "../verdicts.html#halves-and-thirds", "runs": f"{runs}/thick_mnist",
         "command": "#rerun"},
        {"derivation": "../verdicts.html#sums", "runs": f"{runs}/mnist", "command": "#rerun"},
        {"derivation": "../verdicts.html#sums", "runs": "#rerun", "command": "#rerun"}]
    shared = text.split("All of these:")[1].split("</p>")[0] # links that its claims share
    assert re.findall('href="(.*?)">(\\w+)</a>', shared) == [
        ("../verdicts.html#sums", "derivation"), ("#rerun", "runs"), ("#rerun", "command")]
    assert text.index("This page:") < text.index("The rest.") # Below the verdict box
    assert "This page:" not in (out/"index.html").read_text()


@pytest.mark.slow
def test_an_executed_notebook_is_shown_if_its_run_finished(clone, capfd):
    finished, killed = {"end_time": "2026-11-20T10:00:00", "exception": None}, {"end_time": None}
    write_notebook(clone/"runs/index.ipynb", ["# Executed", "Done."], papermill=finished)
    write_notebook(clone/"runs/budgets/toy.ipynb", ["# Half done"], papermill=killed)
    out = build(clone, "runs")
    assert "Executed" in (out/"index.html").read_text()
    assert "Halves" in (out/"budgets/toy.html").read_text()
    said = capfd.readouterr().err
    assert "the run of budgets/toy.ipynb did not finish" in said
    assert "not_yet.ipynb is in _quarto.yml and not there yet" in said


def test_nothing_changed_nothing_built(built, monkeypatch):
    clone, before = built.parent, (built/"index.html").stat().st_mtime_ns
    monkeypatch.setattr("dp_companion.site.site._build",
                        lambda *_: pytest.fail("it was built again"))
    write_notebook(clone/"nbs/index.ipynb", INDEX, papermill={"end_time": "later",
        "exception": None})
    assert build(clone) == built and (built/"index.html").stat().st_mtime_ns == before


def test_the_hash_covers_what_pages_show_and_link(clone):
    inputs, hashes = read_inputs(clone/"nbs", clone), []
    changes = [lambda: None, lambda: write_notebook(clone/"nbs/index.ipynb", ["# Changed"]),
               lambda: (clone/"linked.txt").write_text("1"),
               lambda: (clone/"toy/budgets/toy.py").write_text("x = 1"),
               lambda: (clone/"nbs/styles.css").write_text("p {}")]
    for change in changes:
        change()
        hashes.append(_inputs_hash(inputs, "sphinx", ["linked.txt"]))
    assert len(set(hashes)) == len(changes)
    assert _inputs_hash(inputs, "quarto", ["linked.txt"]) != hashes[-1]


# --- What goes wrong --------------------------------------------------------------------------

def test_bad_input_is_one_sentence(clone, monkeypatch):
    with pytest.raises(SiteError,
                       match="^notebooks must be an existing folder, got notebooks=.*nowhere"):
        build_site("nowhere", root=clone)
    with pytest.raises(SiteError, match="^root must hold a _quarto.yml, got root="):
        build_site("nbs", root=clone/"nbs")
    (clone/"mine").mkdir()
    (clone/"mine/thesis.tex").write_text("x")
    with pytest.raises(SiteError,
                       match="^out must be a new folder or a site built before, got out="):
        build_site("nbs", "mine", root=clone)
    assert (clone/"mine/thesis.tex").is_file()
    monkeypatch.chdir(clone.parent)
    with pytest.raises(SiteError, match="^the working directory must be in a clone"):
        build_site("nbs")


@pytest.mark.slow
@pytest.mark.parametrize("texts, sentence", [
    (["see @eq-gone"], "index refers to @eq-gone, which no page defines"),
    (["```{nodirective}\n```"], "index: Unknown directive type: 'nodirective'"),
    (["$\\epsilom$", "![x](gone.png)"],
     "index: image file not readable: gone.png [image.not_readable] (and 1 more like it)"),
    (["[x](gone.ipynb)", "[x](budgets/toy.ipynb#gone)", "<img src='https://x.example/a.png'>"],
     "index.html fetches https://x.example/a.png from another host (and 2 more like it)"),
])
def test_a_broken_reference_fails_and_the_old_site_stays(clone, texts, sentence):
    (clone/"_site").mkdir()
    for name in ("index.html", ".built-from.json"):
        (clone/"_site"/name).write_text('{"hash": "old", "linked": []}')
    write_notebook(clone/"nbs/index.ipynb", ["# Toy", *texts])
    with pytest.raises(SiteError) as raised: build(clone)
    assert str(raised.value).startswith(sentence) and "\n" not in str(raised.value)
    assert "old" in (clone/"_site/index.html").read_text() and beside(clone) == []


@pytest.mark.slow
def test_a_killed_build_leaves_no_half_site(clone, built):
    out = shutil.copytree(built, clone/"_site")
    whole = sorted(path.relative_to(out) for path in out.rglob("*"))
    write_notebook(clone/"nbs/index.ipynb", ["# Changed"])
    script = ("from dp_companion.site.site import build_site; print('go', flush=True); "
              f"build_site('nbs', root={str(clone)!r})")
    for delay in (0.5, 2):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
        process.stdout.readline()
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found = sorted(path.relative_to(out) for path in out.rglob("*"))
        assert found == whole or "Changed" in (out/"index.html").read_text()
    build(clone)
    assert "Changed" in (out/"index.html").read_text() and beside(clone) == []


def test_quarto_gets_a_project_that_lists_what_is_there(clone, monkeypatch):
    "A stand-in for Quarto copies what it is given: it shows how the real one is called."
    (clone/"bin").mkdir()
    stand_in = clone/"bin/quarto"
    stand_in.write_text(f"#!{sys.executable}\nimport pathlib, sys\nproject = "
                        "pathlib.Path(sys.argv[2])\n(project/'_site').mkdir()\n"
                        "(project/'_site/index.html').write_text(' '.join(sys.argv[1:]) + "
                        "(project/'_quarto.yml').read_text())\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr("dp_companion.site.site.shutil.which", lambda name: str(stand_in))
    monkeypatch.setenv("PATH", f"{clone/'bin'}{os.pathsep}{os.environ['PATH']}")
    out = build_site("nbs", root=clone)
    said = (out/"index.html").read_text()
    assert said.startswith("render ") and "--no-execute" in said and "budgets/toy.ipynb" in said
    assert "not_yet" not in said
    page = json.loads((clone/"_proc/budgets/toy.ipynb").read_text())["cells"]
    assert "title: Halves" in page[0]["source"]
    assert any("{#eq-half}" in cell["source"] for cell in page)
    assert not any("secret" in cell["source"] or "#| export" in cell["source"] for cell in page)
    assert (clone/"_proc/_files/nbs/budgets/toy.ipynb").is_file()
    assert "@eq-half" not in (clone/"_proc/index.ipynb").read_text()
    stand_in.write_text("#!/bin/sh\necho 'ERROR: no' >&2\nexit 3\n")
    write_notebook(clone/"nbs/index.ipynb", ["# Changed"])
    with pytest.raises(SiteError, match="^Quarto stopped with status 3: ERROR: no$"):
        build_site("nbs", root=clone)
    assert (out/"index.html").read_text() == said
