"The page of audited claims shows every headline."
import json
import pytest
from dp_companion.papers.audited_claims import HEADLINES


@pytest.mark.parametrize("paper", HEADLINES)
def test_page_shows_every_headline_with_three_epsilons(root, paper):
    cells = json.loads(
        (root/"nbs"/"papers"/"audited_claims.ipynb").read_text(encoding="utf-8")
    )["cells"]
    shown = "\n".join(
        "".join(output["data"]["text/markdown"]) for cell in cells
        for output in cell.get("outputs", []) if "text/markdown" in output.get("data", {})
    )
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith(f"| {paper} |")]
    assert len(rows) >= 2 and all(
        len(row) == 9 and float(row[5].replace(",", "")) >= 0 for row in rows
    ), "run `make pages`"
