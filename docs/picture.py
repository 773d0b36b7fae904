"""Gives the tables of a notebook a picture beside their HTML: `python docs/picture.py nbs/index.ipynb`

The picture is for places that show no HTML."""
import base64
import shutil
import sys

from fastcore.nbio import read_nb, write_nb
from playwright.sync_api import sync_playwright

BROWSERS = 'chromium', 'chromium-browser', 'google-chrome'
STYLE = 'padding:12px;width:max-content;font:13px DejaVu Sans,sans-serif;background:white;color:#222'


def main(path):
    "Take the pictures in chromium"
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not chromium: sys.exit(f"none of {', '.join(BROWSERS)} is installed (Debian: apt install chromium)")
    nb = read_nb(path)
    tables = [o.data for c in nb.cells for o in c.get('outputs', []) if 'text/html' in o.get('data', {})]
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=['--no-sandbox'])
        page = browser.new_page(device_scale_factor=2)
        for data in tables:
            page.set_content(f'<div id="o" style="{STYLE}">' + data['text/html'])
            data['image/png'] = base64.b64encode(page.locator('#o').screenshot()).decode() + '\n'
        browser.close()
    write_nb(nb, path)


if __name__ == '__main__': main(sys.argv[1])
