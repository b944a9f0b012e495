"""Headless Chromium, as far as a test needs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest


def image_widths(page: Path, folder: Path) -> list[tuple[int, int]]:
    """Of every image on a page, its own width and that on the screen, in pixels; 0 for one that does not decode."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs Chromium")
    text = page.read_text(encoding="utf-8")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', text)[0]
    sizes = "[...document.images].map(i => [i.naturalWidth, i.width])"
    probe = f"<script>onload = () => {{ document.title = JSON.stringify({sizes}) }}</script>"
    copy = folder / "page.html"
    copy.write_text(text.replace(policy, "") + probe, encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    words = [browser, *flags, "--window-size=1300,1000", "--virtual-time-budget=5000", "--dump-dom", f"file://{copy}"]
    environment = {**os.environ, "HOME": str(folder)}
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=environment).stdout
    return json.loads(unescape(re.search(r"<title>(.*?)</title>", shown)[1]))
