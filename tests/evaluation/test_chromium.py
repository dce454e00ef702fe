"""The report page in headless Chromium: nothing overflows at phone and desktop width, light and dark are legible.

Skipped, loudly, where no Chromium is installed (`apt-get install chromium`).
"""

from __future__ import annotations

import html as html_module
import json
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from medusa_train.evaluation.groups import TreeInfo
from medusa_train.evaluation.html import html_report
from medusa_train.evaluation.summarise import summarise
from tests.evaluation.made_up import TREE, arm_info, group_info, options, random_records, suite_of

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
if CHROMIUM is None:
    warnings.warn("NO CHROMIUM: THE REPORT PAGE IS NOT CHECKED IN A BROWSER", stacklevel=1)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NO CHROMIUM IS INSTALLED: the report page goes unchecked")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]

# Runs in the page that holds the report in a frame of the width to check.
MEASURE = """
const frame = document.querySelector('iframe');
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, found = {overflow: [], clipped: [], tiny: []};
  for (const details of page.querySelectorAll('details')) details.open = true;
  const width = page.documentElement.clientWidth;
  found.width = width;
  found.scrollWidth = page.documentElement.scrollWidth;
  for (const element of page.querySelectorAll('body *')) {
    if (element.closest('.scroll') || element.closest('svg')) continue;
    const box = element.getBoundingClientRect();
    if (box.right > width + 1) found.overflow.push(element.tagName + ' ' + element.textContent.slice(0, 40));
  }
  for (const text of page.querySelectorAll('svg text')) {
    const svg = text.closest('svg').getBoundingClientRect(), box = text.getBoundingClientRect();
    const name = text.closest('svg').getAttribute('aria-label') + ': ' + text.textContent;
    if (box.left < svg.left - 2 || box.right > svg.right + 2 || box.bottom > svg.bottom + 2) found.clipped.push(name);
    if (box.height < 9) found.tiny.push(name + ' ' + box.height);
  }
  const style = element => view.getComputedStyle(page.querySelector(element));
  found.background = style('body').backgroundColor;
  found.text = style('body').color;
  found.soft = style('.soft').color;
  found.bar = style('svg .measured').fill;
  found.figures = page.querySelectorAll('figure svg').length;
  const out = document.createElement('pre');
  out.id = 'found';
  out.textContent = JSON.stringify(found);
  document.body.append(out);
};
frame.srcdoc = document.querySelector('#page').textContent;
"""


@pytest.fixture(scope="module")
def page() -> str:
    """A report with a narrow and a wide tree and every section."""
    wide = TreeInfo("tree of a file with a rather long name.json, 63 nodes", _wide_tree(), "imported")
    info = group_info(arm_info(), arm_info("a wide tree of sixty-three nodes, typical", "typical", wide))
    records = random_records(20, info)
    report = summarise(
        [(info, records)],
        suite_of(records),
        options(available_prompts=64),
        settings_hash="x",
        peak_memory=(1_300_000_000, "resident memory of the process, at its peak"),
        command="medusa-train eval-acceptance runs/quickstart/heads --suite spec-bench --out runs/quickstart/report",
    )
    assert TREE.name in html_report(report)
    return html_report(report)


def _wide_tree() -> tuple[tuple[int, ...], ...]:
    """A full product tree of 4, 3, 2 and 1 ranks: 4 + 12 + 24 + 23 nodes, one leaf left out."""
    levels: list[list[tuple[int, ...]]] = [[()]]
    for width in (4, 3, 2, 1):
        levels.append([(*path, rank) for path in levels[-1] for rank in range(width)])
    return tuple(path for level in levels[1:] for path in level)[:63]


def browse(folder: Path, *arguments: str) -> str:
    """Runs Chromium with a fresh profile; returns its standard output."""
    run = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return run.stdout


def measure(page: str, folder: Path, width: int, dark: bool) -> dict:
    """What MEASURE finds with the page in a frame `width` pixels wide."""
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        "<!doctype html><meta charset=utf-8><body style='margin:0'>"
        f"<textarea id=page hidden>{html_module.escape(page)}</textarea>"
        f"<iframe style='border:0;width:{width}px;height:3000px'></iframe><script>{MEASURE}</script>",
        encoding="utf-8",
    )
    dom = browse(
        folder,
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--window-size=1400,3000",
        "--virtual-time-budget=5000",
        "--dump-dom",
        wrapper.as_uri(),
    )
    found = dom.split('<pre id="found">')[1].split("</pre>")[0]
    return json.loads(html_module.unescape(found))


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)", as WCAG defines it."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False), (1280, True)])
def test_page_fits_and_is_legible(page, tmp_path, width, dark):
    found = measure(page, tmp_path, width, dark)
    assert found["width"] == width
    assert found["scrollWidth"] <= width, "the page scrolls sideways"
    assert found["overflow"] == []
    assert found["clipped"] == []
    assert found["tiny"] == []
    assert found["figures"] == 1 + 2 * 5
    assert (luminance(found["background"]) < 0.2) == dark
    assert contrast(found["text"], found["background"]) >= 7
    assert contrast(found["soft"], found["background"]) >= 4.5
    assert contrast(found["bar"], found["background"]) >= 3


@pytest.mark.parametrize(("name", "size"), [("phone", "500,4000"), ("desktop", "1280,3000")])
def test_screenshot_and_print(page, tmp_path, name, size):
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    picture = tmp_path / f"{name}.png"
    browse(tmp_path, f"--window-size={size}", f"--screenshot={picture}", path.as_uri())
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    # A blank page of this size compresses to a few kilobytes.
    assert picture.stat().st_size > 60_000
    document = tmp_path / f"{name}.pdf"
    browse(tmp_path, f"--print-to-pdf={document}", "--no-pdf-header-footer", path.as_uri())
    assert document.read_bytes()[:5] == b"%PDF-"
