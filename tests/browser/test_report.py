"""The report in a real browser: opened as a file, wide and narrow, with the network watched."""

import html
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from leadline.report import build_report

pytestmark = pytest.mark.browser

WIDTHS = (1280, 420)
SAMPLES = ("green", "red-twin", "oom", "partial")

# Loads each report in a frame of each width and writes down what a reader would see.
MEASURE = """
<!doctype html><meta charset="utf-8"><body><script>
const jobs = JOBS, seen = {};
addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, view = frame.contentWindow;
    const shown = (rule) => view.getComputedStyle(page.querySelector(rule)).display !== "none";
    seen[frame.name] = {
      verdict: page.querySelector("h1").innerText,
      tone: view.getComputedStyle(page.querySelector(".banner")).backgroundColor,
      headings: [...page.querySelectorAll("h2")].map((h) => h.innerText),
      wide: shown(".chart-wide"), narrow: shown(".chart-narrow"),
      overflow: page.documentElement.scrollWidth - frame.clientWidth,
      drawings: [...page.querySelectorAll("svg.chart")].filter((s) => s.clientHeight > 0).length,
      scripts: page.scripts.length,
    };
  }
  document.body.textContent = JSON.stringify(seen);
});
for (const [name, file, width] of jobs) {
  const frame = document.createElement("iframe");
  frame.name = name; frame.src = file; frame.style = `border:0;width:${width}px;height:900px`;
  document.body.append(frame);
}
</script></body>
"""


@pytest.fixture
def seen(open_page, sample_runs, tmp_path: Path) -> dict[str, Any]:
    """What the browser shows of every sample at every width, in one launch."""
    jobs = []
    for name in SAMPLES:
        build_report(sample_runs.SAMPLES[name](tmp_path / name).path)
        jobs += [(f"{name}-{width}", f"{name}/report.html", width) for width in WIDTHS]
    page = tmp_path / "measure.html"
    page.write_text(MEASURE.replace("JOBS", json.dumps(jobs)), encoding="utf-8")
    body = re.search(r"<body>(.*)</body>", open_page(page.as_uri()), re.DOTALL)
    assert body is not None
    return json.loads(html.unescape(body[1]))


def test_report_in_a_browser_reads_well_at_every_width(seen: dict[str, Any]) -> None:
    assert sorted(seen) == sorted(f"{name}-{width}" for name in SAMPLES for width in WIDTHS)
    for key, page in seen.items():
        width = int(key.rpartition("-")[2])
        assert page["overflow"] == 0, key
        assert (page["wide"], page["narrow"]) == (width == 1280, width == 420), key
        assert page["drawings"] >= (1 if key.startswith("red") else 4), key
        assert page["headings"][0] == "Evidence", key
        assert len(page["headings"]) == 9, key
        assert page["scripts"] == 0, key


def test_report_banner_is_green_only_for_the_green_run(seen: dict[str, Any]) -> None:
    tones = {key: page["tone"] for key, page in seen.items()}
    verdicts = {key: page["verdict"] for key, page in seen.items()}
    assert "Gate green" in verdicts["green-1280"]
    assert all("Gate red" in verdicts[f"{name}-420"] for name in SAMPLES[1:])
    assert len({tones[f"{name}-1280"] for name in SAMPLES[1:]}) == 1
    assert tones["green-1280"] != tones["oom-1280"]


class _Recorder(BaseHTTPRequestHandler):
    """A proxy that carries nothing and remembers what was asked of it."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(502)

    do_CONNECT = do_GET

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def _recording_proxy() -> Iterator[tuple[int, list[str]]]:
    handler = type("Recorder", (_Recorder,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], handler.asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_report_in_a_browser_asks_the_network_for_nothing(
    open_page, sample_runs, tmp_path: Path
) -> None:
    report = build_report(sample_runs.SAMPLES["green"](tmp_path / "green").path)
    # The browser itself may call home; a page with planted addresses shows what is a page's own.
    planted = tmp_path / "planted.html"
    planted.write_text('<img src="http://planted.test/a.png"><script src="http://planted.test/b">')
    asked = {}
    for page in (planted, report):
        with _recording_proxy() as (port, requests):
            open_page(page.as_uri(), f"--proxy-server=http://127.0.0.1:{port}")
            asked[page.name] = list(requests)
    own_calls = re.compile(r"google|gstatic|gvt1|chromium|debian")
    own = {name: [a for a in found if not own_calls.search(a)] for name, found in asked.items()}
    assert len(own["planted.html"]) == 2
    assert own["report.html"] == []
