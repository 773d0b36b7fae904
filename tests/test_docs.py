"The documentation site: every page of it, built once and read by a real browser; and what must hold where there is neither Zensical nor a browser."
import importlib
import json
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [o for o in sorted((ROOT/'nbs').rglob('*.ipynb')) if not any(p.startswith(('.', '_')) for p in o.relative_to(ROOT).parts)]
SOME = 'index.html reference/compare.html reference/recipes.html reference/commands.html reference/callback.profiler.html reference/report.html reference/names.html changelog.html'.split()


@pytest.fixture(scope='module')
def docs():
    "The modules of docs/"
    before, path = set(sys.modules), str(ROOT/'docs')
    sys.path.insert(0, path)
    yield importlib.import_module
    sys.path.remove(path)
    for o in set(sys.modules) - before:
        if getattr(sys.modules[o], '__file__', None) and str(Path(sys.modules[o].__file__).parent) == path: del sys.modules[o]


@pytest.fixture(scope='module')
def built(docs, tmp_path_factory):
    "The site, made once: (folder, Site)"
    make, folder = docs('make'), tmp_path_factory.mktemp('a site')
    try: make.check()
    except make.CannotBuild as e: pytest.skip(str(e))
    return folder/'site', make.make(folder/'site', folder/'work')


@pytest.fixture(scope='module')
def site(built): return built[0]


@pytest.fixture(scope='module')
def url(site):
    "The site on a local server"
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()
    server.server_close()


@pytest.fixture(scope='module')
def html(site, docs):
    "page -> ids, references, images"
    return docs('links').read(site)


# Every page

def pages(site): return [o.relative_to(site).as_posix() for o in sorted(site.rglob('*.html')) if o.parent.name != 'pictures' and o.name != '404.html']


def test_no_dead_link(site, docs, html): assert docs('links').dead(site, html) == []


def test_dead_links_are_seen(docs, tmp_path):
    (tmp_path/'in').mkdir()
    (tmp_path/'a.html').write_text('<h1 id="x"><a href="in/b.html#no">1</a><a href="in/b.html#y">2</a><a href="gone.html">3</a><a href="#x">4</a><a href="#z">5</a><img src="no.png"><a href="https://a.b/c">6</a>')
    (tmp_path/'in/b.html').write_text('<p id="y"><a href="../a.html#x">1</a><a href="a.html">2</a>')
    (tmp_path/'a.md').write_text('[1](in/b.html) [2](in/c.md) `[3](gone.md)`\n```\n[4](gone.md)\n```\n')
    assert docs('links').dead(tmp_path) == ['a.html: in/b.html#no', 'a.html: gone.html', 'a.html: #z', 'a.html: no.png', 'in/b.html: a.html', 'a.md: in/c.md']


def test_pages_are_small_and_have_a_twin(site):
    for page in pages(site):
        assert (site/page).stat().st_size < 1_000_000, page
        twin = (site/page).with_suffix('.md').read_text(encoding='utf-8')
        assert twin.startswith('# ') and len(twin) > 40, page
        assert not re.search(r'^#+ .*\{#|\{\.(source|symbol|where|output)|^search:|^\{\.', twin, re.M), page


def test_images_have_alt_text(html):
    found = [o for p, h in html.items() if not p.startswith('pictures/') for o in h.images]
    assert len(found) > 10 and all(alt and len(alt) > 8 for _, alt in found)


def test_llms_txt_lists_every_page(site):
    text = (site/'llms.txt').read_text(encoding='utf-8')
    assert text.startswith('# fastbench\n\n> ')
    listed = re.findall(r'^- \[[^\]]+\]\(([^)]+)\)', text, re.M)
    assert sorted(listed) == sorted(o.removesuffix('.html') + '.md' for o in pages(site))


def test_a_page_for_every_notebook(built):
    site, made = built
    assert {b.path for b in made.books} == set(NOTEBOOKS)
    places = [b.page for b in made.books]
    assert len(set(places)) == len(places)
    nav = json.dumps(made.nav)
    for b in made.books:
        html = site/(b.page.removesuffix('.md') + '.html')
        assert html.exists() and f'"{b.page}"' in nav, b.file
        assert b.title in html.read_text(encoding='utf-8').replace('&amp;', '&').replace('&#x27;', "'")


def test_every_name_is_shown_once_with_its_source(built, html):
    made, n = built[1], 0
    assert len(made.names.public) > 500
    for (module, name), b in made.names.public.items():
        page = html[b.page.removesuffix('.md') + '.html']
        assert name in page.ids, (module, name)
        source = html[f'source/{module}.html']
        n += f"__codelineno-0-{made.names.lines[module].get(name, 0)}" in source.ids
    assert n == len(made.names.public)
    exported = {(m.removeprefix('fastbench.'), o) for m in sys.modules if m.startswith('fastbench.') and m != 'fastbench.all'
                and (ROOT/(m.replace('.', '/') + '.py')).exists() for o in getattr(sys.modules[m], '__all__', ())}
    assert exported <= set(made.names.public)


def test_the_line_of_a_name_is_where_it_is_made(built):
    made = built[1].names
    for module, name, start in (('compare', 'compare', 'def compare('), ('record', 'Run.as_dict', '@patch'), ('record', 'STATUSES', 'STATUSES = '), ('query', 'select', 'def select(')):
        text = (ROOT/f'fastbench/{module}.py').read_text().splitlines()
        assert text[made.lines[module][name]-1].startswith(start)


def test_commands_are_those_of_the_command_line(built):
    text = (built[0]/'reference/commands.md').read_text(encoding='utf-8')
    def said(*args): return subprocess.run([sys.executable, '-m', 'fastbench', *args, '--help'], capture_output=True, text=True, cwd=ROOT, env={'TERM': 'dumb', 'COLUMNS': '200', 'PATH': ''}).stdout
    parts = re.split(r'^## `fastbench ([a-z-]+)`$', text, flags=re.M)
    by_name = dict(zip(parts[1::2], parts[2::2]))
    listed = re.findall(r'^  ([a-z-]+) ', said().split('Commands:')[1], re.M)
    assert list(by_name) == listed and len(listed) > 8
    for name in ('run', 'list', 'ab'):
        options = set(re.findall(r'^  (?:-\w, )?(--[a-z-]+)', said(name).split('Options:')[1], re.M)) - {'--help'}
        assert len(options) > 5 and {o for o in options if f'`{o}`' not in by_name[name]} == set()


def test_recipes_are_those_of_the_registry(built):
    from fastbench.recipe import ladders, published, recipes, suites
    text = (built[0]/'reference/recipes.md').read_text(encoding='utf-8')
    html = (built[0]/'reference/recipes.html').read_text(encoding='utf-8')
    for o in recipes(): assert f'id="{o}"' in html, o
    for o in suites(): assert f'`{o}`' in text
    for r in recipes():
        for o in published(r): assert o['machine'] in text and f"{o['seconds']:,.4g} s" in text or f"{o['seconds']:,.0f} s" in text
    for ladder in ladders().values():
        for rung in ladder.rungs: assert rung.seconds is None or f'{rung.seconds:,.4g} s' in text


def test_every_field_of_a_run_is_described(built):
    from fastbench.record import STATUSES, Run
    text = (built[0]/'reference/run-fields.md').read_text(encoding='utf-8')
    for o in Run.__dataclass_fields__: assert re.search(rf'^\| `{o}` \| `[^|]*(\\\|[^|]*)?` \| \S', text, re.M), o
    for o in STATUSES: assert f'| `{o}` |' in text


# In a browser

def test_no_page_asks_another_host_says_an_error_or_scrolls_sideways(site, url, browser):
    context = browser.new_context(viewport=dict(width=390, height=800))
    page, requests, console, wide = context.new_page(), [], [], []
    page.on('request', lambda o: requests.append(o.url))
    page.on('console', lambda o: console.append((page.url, o.text)) if o.type in ('error', 'warning') else None)
    page.on('pageerror', lambda o: console.append((page.url, str(o))))
    page.on('requestfailed', lambda o: console.append((page.url, o.url)))
    some = [o for o in pages(site) if not o.startswith('source/')] + ['source/compare.html', 'source/benchmarks/gains.html']
    for o in some:
        page.goto(url + o)
        if page.evaluate('document.documentElement.scrollWidth > document.documentElement.clientWidth'): wide.append(o)
    context.close()
    assert {o for o in requests if not o.startswith(url) and not o.startswith(('data:', 'blob:', 'about:'))} == set()
    assert console == [] and wide == []


def test_code_fits_its_box_on_a_desktop(site, url, browser):
    context = browser.new_context(viewport=dict(width=1280, height=900))
    page, wide = context.new_page(), []
    for o in [*SOME, 'reference/recipe.html', 'reference/table.html', 'reference/text.tokens.html', 'source/text.hf.html']:
        page.goto(url + o)
        wide += [(o, t) for t in page.evaluate('''[...document.querySelectorAll("pre code, .output.html")].filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 80))''')]
    context.close()
    assert not wide, "\n".join(map(str, wide))


# [text, ratio] of every text, colours that let something through painted over each other
CONTRASTS = """() => {
  const g = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true}), seen = new Map(), res = [];
  const paint = colours => { const key = colours.join(); if (!seen.has(key)) { g.fillStyle = '#fff'; g.fillRect(0, 0, 1, 1);
    for (const c of colours) { g.fillStyle = c; g.fillRect(0, 0, 1, 1) } seen.set(key, [...g.getImageData(0, 0, 1, 1).data].slice(0, 3)) } return seen.get(key) };
  const lum = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= .03928 ? v/12.92 : ((v+.055)/1.055)**2.4 }); return .2126*r + .7152*g + .0722*b };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; n = walk.nextNode();) {
    const e = n.parentElement, box = e.getBoundingClientRect(), s = getComputedStyle(e);
    if (!n.textContent.trim() || box.width < 2 || box.height < 2 || s.visibility == 'hidden' || !e.checkVisibility({opacityProperty: true})) continue;
    const back = []; for (let o = e; o; o = o.parentElement) back.unshift(getComputedStyle(o).backgroundColor);
    const a = lum(paint([...back, s.color])), b = lum(paint(back));
    res.push([n.textContent.trim().slice(0, 60), s.color, (Math.max(a, b) + .05)/(Math.min(a, b) + .05)]);
  }
  return res }"""


@pytest.mark.parametrize('dark', [False, True])
def test_text_can_be_read(url, visit, dark):
    for o in SOME:
        v = visit(url + o, dark=dark)
        got = v.evaluate(CONTRASTS)
        assert len(got) > 60 and [x for x in got if x[2] < 4.5] == [], o
        back = v.evaluate('getComputedStyle(document.body).backgroundColor')
        assert (sum(map(int, re.findall(r'\d+', back)[:3])) < 200) == dark


# The search lives in a shadow root that is closed, also for a test
OPEN = 'Element.prototype.attachShadow = (f => function(o) { return f.call(this, {...o, mode: "open"}) })(Element.prototype.attachShadow)'


@pytest.fixture
def search(url, browser):
    "search(text, on page) -> page with the results of `text`, and the first of them"
    contexts = []

    def _search(text, page='index.html'):
        contexts.append(browser.new_context(viewport=dict(width=1280, height=900)))
        contexts[-1].add_init_script(OPEN)
        contexts[-1].set_default_timeout(15_000)
        p = contexts[-1].new_page()
        p.goto(url + page, wait_until='networkidle')
        p.locator('.md-search__button').first.focus()
        p.keyboard.press('Enter')
        p.locator('input:visible:not([type=radio])').last.fill(text)
        found = p.locator('ol a:has(mark)')
        found.first.wait_for()
        return p, found
    yield _search
    for o in contexts: o.close()


@pytest.mark.parametrize('name,place', [('compare_times', 'reference/verdict.html#compare_times'), ('TextDL', 'reference/text.loader.html#TextDL'),
                                        ('fastbench ladder', 'reference/commands.html#fastbench-ladder')])
def test_search_finds_a_name_and_lands_on_it(search, url, name, place):
    page, found = search(name)
    hrefs = [re.sub(r'\?[^#]*', '', o) for o in found.evaluate_all('all => all.map(o => o.getAttribute("href"))')]
    assert url + place in hrefs[:12], hrefs
    found.nth(hrefs.index(url + place)).click()
    page.wait_for_url(re.compile(re.escape(place.split('#')[0])))
    assert re.sub(r'\?[^#]*', '', page.url) == url + place
    page.wait_for_function(f'(() => {{ const y = document.getElementById({place.split("#")[1]!r}).getBoundingClientRect().top; return y >= 0 && y < innerHeight }})()')


def test_search_needs_no_mouse(search, url):
    page, found = search('compare_times')
    page.keyboard.press('Enter')  # the first
    page.wait_for_url(re.compile('verdict.html.*#compare_times$'))


def test_keyboard_reaches_search_and_navigation(url, visit):
    v = visit(url + 'reference/compare.html')
    seen = []
    for _ in range(40):
        v.page.keyboard.press('Tab')
        seen.append(v.evaluate('(() => { const o = document.activeElement, s = getComputedStyle(o); return [o.tagName, o.className, (o.textContent || "").trim(), s.outlineStyle] })()'))
    assert seen[0][2] == 'Skip to content'
    assert any('md-search__button' in o[1] for o in seen) and any('md-tabs__link' in o[1] and o[2] == 'Changelog' for o in seen)
    assert any('md-nav__link' in o[1] and o[2] == 'Optimizers' for o in seen)
    v.page.locator('.md-tabs__link', has_text='Changelog').focus()
    v.page.keyboard.press('Enter')
    v.page.wait_for_url(url + 'changelog.html')
