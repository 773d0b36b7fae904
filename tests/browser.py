"A real browser for tests of pages; where there is none, the reason."
import os
import shutil

import pytest

LIMIT = 300_000  # milliseconds; only against hanging: a busy machine needs more than Playwright's 30 s at times
NAMES = 'chromium', 'chromium-browser', 'google-chrome'

# The contrast of every visible text with what lies behind it: [text, ratio]
CONTRASTS = """() => {
  const rgb = s => { const m = s.match(/[\\d.]+/g).map(Number); return m.length > 3 && m[3] == 0 ? null : m.slice(0, 3) };
  const lum = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= .03928 ? v/12.92 : ((v+.055)/1.055)**2.4 }); return .2126*r + .7152*g + .0722*b };
  const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c) return c } return [255, 255, 255] };
  const res = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; n = walk.nextNode();) {
    const e = n.parentElement, box = e.getBoundingClientRect();
    if (!n.textContent.trim() || !box.width || !box.height || e.closest('svg title')) continue;
    const s = getComputedStyle(e), a = lum(rgb(e.closest('svg') ? s.fill : s.color)), b = lum(behind(e));
    res.push([n.textContent.trim().slice(0, 60), (Math.max(a, b) + .05)/(Math.min(a, b) + .05)]);
  }
  return res }"""


@pytest.fixture(scope='module')  # not longer: its event loop would be running in all tests that follow
def browser():
    "Chromium, headless"
    api = pytest.importorskip('playwright.sync_api', reason='playwright is not installed: it comes with the extra dev')
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if not path: pytest.skip(f"none of {', '.join(NAMES)} is installed (Debian: apt install chromium)")
    with api.sync_playwright() as p:
        args = ['--disable-gpu', '--disable-software-rasterizer', '--disable-gpu-compositing']  # no screen to paint on: saves a sixth of the time
        if hasattr(os, 'geteuid') and os.geteuid() == 0: args.append('--no-sandbox')
        b = p.chromium.launch(executable_path=path, args=args, timeout=LIMIT)
        yield b
        b.close()


class Visit:
    "A page as it was opened: `page`, what it asked for, what the console said"
    def __init__(self, context, url):
        self.requests, self.console = [], []
        self.page = context.new_page()
        self.page.on('request', lambda o: self.requests.append(o.url))
        self.page.on('console', lambda o: self.console.append(f'{o.type}: {o.text}'))
        self.page.on('pageerror', lambda o: self.console.append(f'error: {o}'))
        self.url = url
        self.page.goto(url)

    def __getattr__(self, name): return getattr(self.page, name)

    @property
    def overflow(self): return self.page.evaluate('document.documentElement.scrollWidth - document.documentElement.clientWidth')

    def open_all(self): self.page.evaluate('document.querySelectorAll("details").forEach(o => o.open = true)')

    def contrasts(self): return self.page.evaluate(CONTRASTS)


@pytest.fixture
def visit(browser):
    "visit(path or url, width=1280, dark=False) -> Visit; closed after the test"
    contexts = []

    def _visit(where, width=1280, height=900, dark=False, **kw):
        contexts.append(browser.new_context(viewport=dict(width=width, height=height), color_scheme='dark' if dark else 'light', **kw))
        contexts[-1].set_default_timeout(LIMIT)
        url = str(where) if '://' in str(where) else where.resolve().as_uri()
        return Visit(contexts[-1], url)
    yield _visit
    for o in contexts: o.close()
