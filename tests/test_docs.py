"The documentation site: every page of it, built once and read by a real browser; and what must hold where there is neither Zensical nor a browser."
import base64
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from browser import LIMIT

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [o for o in sorted((ROOT/'nbs').rglob('*.ipynb')) if not any(p.startswith(('.', '_')) for p in o.relative_to(ROOT).parts)]
SOME = 'index.html reference/compare.runs.html reference/recipes.html reference/commands.html reference/measure.profiler.html reference/page.report.html reference/names.html changelog.html'.split()


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
        assert b.title.replace('`', '') in html.read_text(encoding='utf-8').replace('&amp;', '&').replace('&#x27;', "'")


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
    for module, name, start in (('compare.runs', 'compare', 'def compare('), ('runs.record', 'Run.as_dict', '@patch'), ('runs.record', 'STATUSES', 'STATUSES = '), ('runs.query', 'select', 'def select(')):
        text = (ROOT/'fastbench'/f'{module.replace(".", "/")}.py').read_text().splitlines()
        assert text[made.lines[module][name]-1].startswith(start)


def test_commands_are_those_of_the_command_line(built):
    text = (built[0]/'reference/commands.md').read_text(encoding='utf-8')
    def said(*args): return subprocess.run([sys.executable, '-m', 'fastbench', *args, '--help'], capture_output=True, text=True, cwd=ROOT, env={'TERM': 'dumb', 'COLUMNS': '200', 'PATH': ''}).stdout
    parts = re.split(r'^## `fastbench ([a-z -]+)`$', text, flags=re.M)
    by_name = dict(zip(parts[1::2], parts[2::2]))
    listed = re.findall(r'^  ([a-z-]+) ', said().split('Commands:')[1], re.M)
    assert '```sh\nfastbench show last\n' in by_name['show'] and all(f'\nfastbench {o}' in by_name[o].split('```sh')[2] for o in by_name)
    assert list(dict.fromkeys(o.split()[0] for o in by_name)) == listed and len(listed) > 8 and 'cache list' in by_name
    for name in ('run', 'list', 'ab'):
        options = set(re.findall(r'^  (?:-\w, )?(--[a-z-]+)', said(name).split('Options:')[1], re.M)) - {'--help'}
        assert len(options) > 5 and {o for o in options if f'`{o}`' not in by_name[name]} == set()


def test_recipes_are_those_of_the_registry(built):
    from fastbench.ladders import ladders
    from fastbench.recipe import published, recipes, suites
    text = (built[0]/'reference/recipes.md').read_text(encoding='utf-8')
    html = (built[0]/'reference/recipes.html').read_text(encoding='utf-8')
    for o in recipes(): assert f'id="{o}"' in html, o
    for o in suites(): assert f'`{o}`' in text
    for r in recipes():
        for o in published(r): assert o['machine'] in text and f"{o['seconds']:,.4g} s" in text or f"{o['seconds']:,.0f} s" in text
    for ladder in ladders().values():
        for rung in ladder.rungs: assert rung.seconds is None or f'{rung.seconds:,.4g} s' in text or f'{rung.seconds:,.0f} s' in text


def test_the_reference_begins_with_the_names_that_users_need(built):
    import fastbench.all as every
    needed = [o for found in every._needed.values() for o in found]
    for o in needed: assert o in every.__all__ or hasattr(every.BenchLearner, o.removeprefix('learn.')), o
    assert 25 <= len(set(needed)) == len(needed) <= 35 and {'learn.profile', 'hf_learner', 'ab', 'learn.distributed', 'UserError'} <= set(needed)
    text = (built[0]/'reference/index.md').read_text(encoding='utf-8')
    assert re.findall(r'^## (.*)', text, re.M) == [*every._needed, 'Everything else']
    for o in needed: assert re.search(rf'^\| \[`{re.escape(o)}`\]\([^)]+#[^)]+\) \| \S', text, re.M), o
    assert '](names.md)' in text
    nav, = (o['Reference'] for o in built[1].nav if 'Reference' in o)
    assert nav[0] == 'reference/index.md' and [*nav[1], *nav[2], *nav[3], *nav[4]] == ['Commands', 'Recipes, suites and ladders', 'Fields of a Run', 'All names']


def test_every_recipe_and_field_has_an_example(docs, built):
    import shlex
    from fastbench.command.options import field
    from fastbench.ladders import ladders
    from fastbench.recipe import Recipe, but, check_field, kinds, recipes
    text, made, n = (built[0]/'reference/recipes.md').read_text(encoding='utf-8'), docs('reference').own_fields(), 0
    rungs = {f'{l.name}-{o.name}' for l in ladders().values() for o in l.rungs}
    for o in recipes(): assert o in rungs or f'\nfastbench run {o}\n' in text, o
    for o in ladders(): assert f'\nfastbench ladder {o}\n' in text
    assert "`arch='xse_resnet50'`" in text  # of a kind's own fields, too
    assert {(k, o) for k in kinds().values() for o in k.__dataclass_fields__} == {(k, o.name) for k in kinds().values() for c, os in made.items() if issubclass(k, c) for o in os}
    for cls, found in made.items():
        for o in found:
            words = docs('reference').example(cls, o)
            if cls is Recipe and o.name in ('name', 'about') or o.name == 'function': continue
            assert words.startswith('--set ') and f'`{words}`' in text, o.name
            values = dict(map(field, shlex.split(words)[1::2]))
            assert check_field(cls, o.name, values[o.name]) != o.default, words
            some = next((r for r in recipes().values() if isinstance(r, cls)), None)
            if some: but(some, **values).check()  # has an effect
            n += 1
    assert n > 60


def test_every_field_of_a_run_is_described(built):
    from fastbench.runs.record import STATUSES, Run
    text = (built[0]/'reference/run-fields.md').read_text(encoding='utf-8')
    for o in Run.__dataclass_fields__: assert re.search(rf'^\| \[?`{o}`(\]\([^)]*\))? \| `[^|]*(\\\|[^|]*)?` \| \S', text, re.M), o  # a link where a function has the name
    for o in STATUSES: assert f'| `{o}` |' in text


# In a browser

# [text, ratio] of every text, colours that let something through painted over each other
CONTRASTS = """where => {
  const g = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true}), seen = new Map(), res = [];
  const paint = colours => { const key = colours.join(); if (!seen.has(key)) { g.fillStyle = '#fff'; g.fillRect(0, 0, 1, 1);
    for (const c of colours) { g.fillStyle = c; g.fillRect(0, 0, 1, 1) } seen.set(key, [...g.getImageData(0, 0, 1, 1).data].slice(0, 3)) } return seen.get(key) };
  const lum = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= .03928 ? v/12.92 : ((v+.055)/1.055)**2.4 }); return .2126*r + .7152*g + .0722*b };
  const backs = new Map([[null, []]]);
  const behind = e => { if (!backs.has(e)) backs.set(e, [...behind(e.parentElement), getComputedStyle(e).backgroundColor]); return backs.get(e) };
  const walk = document.createTreeWalker(document.querySelector(where), NodeFilter.SHOW_TEXT);
  for (let n; n = walk.nextNode();) {
    const e = n.parentElement, box = e.getBoundingClientRect(), s = getComputedStyle(e);
    if (!n.textContent.trim() || box.width < 2 || box.height < 2 || s.visibility == 'hidden' || !e.checkVisibility({opacityProperty: true})) continue;
    const back = behind(e), a = lum(paint([...back, s.color])), b = lum(paint(back));
    res.push([n.textContent.trim().slice(0, 60), s.color, (Math.max(a, b) + .05)/(Math.min(a, b) + .05)]);
  }
  return res }"""


# Shows a page of the reference in the page that is open. To open it would run the theme's scripts and lay out
# 250 links, three times the work
SHOW = """async url => {
  const there = new DOMParser().parseFromString(await (await fetch(url)).text(), 'text/html');
  history.replaceState(null, '', url);  // for relative links
  for (const part of ['title', '.md-content', '.md-sidebar--secondary']) document.querySelector(part).replaceWith(there.querySelector(part));
  for (const o of document.querySelectorAll('.md-content table:not([class])')) {  // as the theme's script does
    const [outer, inner] = ['scrollwrap', 'table'].map(c => Object.assign(document.createElement('div'), {className: 'md-typeset__' + c}));
    o.replaceWith(outer), outer.append(inner), inner.append(o);
  }
  await Promise.all([...document.querySelectorAll('.md-content img')].map(o => o.decode().catch(() => 0)));
}"""


BOXES = """() => [...document.querySelectorAll("pre code, .output.html")].filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 80))"""


PHONE, DESKTOP = dict(width=390, height=800), dict(width=1280, height=900)


def is_prose(o): return o in SOME or o.startswith(('tutorials/', 'explanations/')) and not o.endswith('index.html')


@pytest.fixture(scope='module')
def seen(site, url, browser):
    """Every page: what it asked for and complained of, what is wider than a phone or its box, and the contrasts of its text in both schemes.
    Prose and a page of each kind are opened; the others are shown in the last one"""
    context = browser.new_context(viewport=PHONE)
    context.set_default_timeout(LIMIT)
    page, res = context.new_page(), types.SimpleNamespace(requests=[], console=[], wide=[], boxes=[], contrasts=[])
    page.on('request', lambda o: res.requests.append(o.url))
    page.on('console', lambda o: res.console.append((page.url, o.text)) if o.type in ('error', 'warning') else None)
    page.on('pageerror', lambda o: res.console.append((page.url, str(o))))
    page.on('response', lambda o: res.console.append((o.url, o.status)) if o.status >= 400 else None)

    def look(o, size, where='body', dark=False):
        if size is PHONE: res.wide += [o]*page.evaluate('document.documentElement.scrollWidth > document.documentElement.clientWidth')
        else:
            res.boxes += [(o, t) for t in page.evaluate(BOXES)]
            back = page.evaluate('getComputedStyle(document.body).backgroundColor')
            is_dark = sum(map(int, re.findall(r'\d+', back)[:3])) < 200
            res.contrasts.append((o, dark, page.evaluate(CONTRASTS, where), is_dark))

    small = json.loads((site/'search.json').read_text(encoding='utf-8'))
    small['items'] = small['items'][:3]  # its index is the same on each page, and takes most of the time
    opened = [o for o in pages(site) if is_prose(o)] + ['source/compare.runs.html', 'source/text.hf.html', 'source/benchmarks/gains.html']
    for i, o in enumerate(opened):
        if i == 3: context.route('**/search.json', lambda r: r.fulfill(json=small))
        page.goto(url + o)
        for size in (PHONE, DESKTOP) if i%2 == 0 else (DESKTOP, PHONE):  # a page opens at the size of the one before
            page.set_viewport_size(size)
            look(o, size)
            if size is DESKTOP and is_prose(o):
                page.emulate_media(color_scheme='dark')
                page.reload()  # it asks as it loads
                look(o, size, dark=True)
                page.emulate_media(color_scheme='light')
    context.route('**/*.js', lambda r: r.fulfill(body='', content_type='text/javascript'))
    page.goto(url + SOME[1])
    for size in PHONE, DESKTOP:
        page.set_viewport_size(size)
        for o in pages(site):
            if o in opened or o.startswith('source/'): continue
            page.evaluate(SHOW, url + o)
            look(o, size, where='.md-content')
    context.close()
    return res


def test_no_page_asks_another_host_says_an_error_or_scrolls_sideways(seen, url):
    assert {o for o in seen.requests if not o.startswith(url) and not o.startswith(('data:', 'blob:', 'about:'))} == set()
    assert seen.console == [] and seen.wide == []


def test_code_fits_its_box_on_a_desktop(seen): assert not seen.boxes, "\n".join(map(str, seen.boxes))


@pytest.mark.parametrize('dark', [False, True])
def test_text_can_be_read(seen, dark):
    got = [o for o in seen.contrasts if o[1] == dark]
    assert len(got) > 30
    for o, _, found, is_dark in got:
        assert is_dark == dark, o
        assert len(found) > (60 if is_prose(o) else 15), o
        assert [x for x in found if x[2] < 4.5] == [], o


# The search lives in a shadow root that is closed, also for a test
OPEN = 'Element.prototype.attachShadow = (f => function(o) { return f.call(this, {...o, mode: "open"}) })(Element.prototype.attachShadow)'


@pytest.fixture
def search(url, browser):
    "search(text, on page, at base) -> page with the results of `text`, and the first of them"
    contexts = []

    def _search(text, page='index.html', base=url):
        contexts.append(browser.new_context(viewport=dict(width=1280, height=900)))
        contexts[-1].add_init_script(OPEN)
        contexts[-1].set_default_timeout(LIMIT)
        p = contexts[-1].new_page()
        p.goto(base + page, wait_until='networkidle')
        p.locator('.md-search__button').first.focus()
        p.keyboard.press('Enter')
        p.locator('input:visible:not([type=radio])').last.fill(text)
        found = p.locator('ol a:has(mark)')
        found.first.wait_for()
        return p, found
    yield _search
    for o in contexts: o.close()


@pytest.mark.parametrize('name,place,first', [('compare_times', 'reference/compare.verdict.html#compare_times', 1), ('TextDL', 'reference/text.loader.html#TextDL', 1), ('Run', 'reference/runs.record.html#Run', 1),
                                              ('Profiler', 'reference/measure.profiler.html#Profiler', 1), ('fastbench ladder', 'reference/commands.html#fastbench-ladder', 12)])
def test_search_finds_a_name_and_lands_on_it(search, url, name, place, first):
    page, found = search(name)
    hrefs = [re.sub(r'\?[^#]*', '', o) for o in found.evaluate_all('all => all.map(o => o.getAttribute("href"))')]
    assert url + place in hrefs[:first], hrefs
    found.nth(hrefs.index(url + place)).click()
    page.wait_for_url(re.compile(re.escape(place.split('#')[0])))
    assert re.sub(r'\?[^#]*', '', page.url) == url + place
    page.wait_for_function(f'(() => {{ const y = document.getElementById({place.split("#")[1]!r}).getBoundingClientRect().top; return y >= 0 && y < innerHeight }})()')


def test_search_works_in_pages_opened_as_files(search, site):
    base = site.as_uri() + '/'
    page, found = search('compare_times', 'tutorials/index.html', base)
    place = 'reference/compare.verdict.html#compare_times'
    assert re.sub(r'\?[^#]*', '', found.first.evaluate('o => o.href')) == base + place
    page.keyboard.press('Enter')
    page.wait_for_url(re.compile('verdict.html.*#compare_times$'))
    assert page.evaluate('typeof __index') == 'object'


def test_search_ranks_names(docs):
    def item(where, title, text='x'): return dict(location=where, title=title, text=text)
    said = '<p>source</p> <pre><code>{}\n</code></pre>'
    page, method, cls = item('tutorials/a.html', 'Run'), item('reference/a.html#Run.save', '<code>Run.save</code>', said.format('Run.save()')), item('reference/a.html#Run', '<code>Run</code>', said.format('class Run(x)'))
    command, other, room, part = item('reference/command.a.html#run', '<code>run</code>'), item('reference/b.html#Run', '<code>Run</code>'), item('reference/a.html', 'Runs'), item('reference/a.html#in-use', 'In use')
    got = docs('search').ranked([room, part, other, page, method, command, cls], dict(Run='reference/a.html#Run'))
    assert [o['location'] for o in got] == ['reference/a.html#Run', 'reference/b.html#Run', 'reference/a.html#Run.save', 'tutorials/a.html', 'reference/a.html', 'reference/a.html#in-use']
    assert got[0]['text'] == '<pre><code>Run(x)\n</code></pre>'
    assert [o['title'] for o in got] == ['<code>Run</code>', '<code>b.Run</code>', '<code>Run.save</code>', 'Run', 'Runs', 'Runs: In use']


# What a worker of the search answers: word -> locations of its first hits
ASK = """async ([index, source, words]) => {
  const w = new Worker(URL.createObjectURL(new Blob([source]))), res = {};
  const ask = m => new Promise(done => { w.onmessage = e => done(e.data); w.postMessage(m) });
  await ask({type: 0, data: index});
  for (const o of words) res[o] = (await ask({type: 2, data: {input: o}})).data.items.map(i => index.items[i.id].location);
  return res }"""
WANTED = {'Colab': 'tutorials/(cloud|install)', 'install': 'tutorials/install', 'GPU': 'tutorials/(two_machines|cuda_profile)|explanations/gpu', 'bottleneck': 'tutorials/input', 'own data': 'tutorials/own_data',
          'profile': 'tutorials/profile', 'compare': 'tutorials/two_machines|reference/compare.runs.html#compare$'}


def test_search_finds_first_what_users_look_for(site, browser):
    index = json.loads((site/'search.json').read_text(encoding='utf-8'))
    for where, title in (('install', 'Install'), ('cloud', 'Benchmark this Colab or cloud instance')):  # whatever else has the word, a page of that title comes first
        if not (site/f'tutorials/{where}.html').exists(): index['items'].append(dict(location=f'tutorials/{where}.html', title=title, text='', path=['Tutorials', title], level=1, tags=[]))
    source, = (o.read_text(encoding='utf-8') for o in (site/'assets/javascripts/workers').glob('search.*.js'))
    page = browser.new_page()
    got = page.evaluate(ASK, [index, source, list(WANTED)])
    page.close()
    assert {w: hits[:3] for w, hits in got.items() if not re.match(WANTED[w], hits[0])} == {}


def test_search_needs_no_mouse(search, url):
    page, found = search('compare_times')
    page.keyboard.press('Enter')  # the first
    page.wait_for_url(re.compile('verdict.html.*#compare_times$'))


def test_keyboard_reaches_search_and_navigation(url, visit):
    v = visit(url + 'reference/compare.runs.html')
    seen = []
    for _ in range(90):  # with each room that comes before it, the link of one is a key further
        v.page.keyboard.press('Tab')
        seen.append(v.evaluate('(() => { const o = document.activeElement, s = getComputedStyle(o); return [o.tagName, o.className, (o.textContent || "").trim(), s.outlineStyle] })()'))
    assert seen[0][2] == 'Skip to content'
    assert any('md-search__button' in o[1] for o in seen) and any('md-tabs__link' in o[1] and o[2] == 'Changelog' for o in seen)
    assert any('md-nav__link' in o[1] and o[2] == 'Optimizers' for o in seen)
    v.page.locator('.md-tabs__link', has_text='Changelog').focus()
    v.page.keyboard.press('Enter')
    v.page.wait_for_url(url + 'changelog.html')


# Without a browser, and without Zensical

def exported():
    "Modules that notebooks write"
    return {m[1] for o in NOTEBOOKS if (m := re.search(r'"#\| *default_exp (\S+?)(?:\\n)?"', o.read_text(encoding='utf-8')))}


def test_a_notebook_for_every_exported_module():
    there = {'.'.join(o.relative_to(ROOT/'fastbench').with_suffix('').parts) for o in (ROOT/'fastbench').rglob('*.py') if 'AUTOGENERATED' in o.read_text(encoding='utf-8')[:400]}
    assert there - {'_modidx'} == exported() and len(there) > 80


@pytest.fixture(scope='module')
def names(docs):
    make, reference = docs('make'), docs('reference')
    return docs('names').Names(make.books_of(ROOT), ROOT, {}, reference.commands(), reference.recipe_names())


def test_every_public_name_has_a_docstring_and_docments(names, docs):
    from functools import cached_property
    Documented, ParameterTable = docs('showdoc').Documented, docs('showdoc').ParameterTable
    commands, silent, nameless, n = list(docs('reference').commands().values()), [], [], 0
    for module, name in names.public:
        o, kinds = names.obj(module, name), (property, cached_property, classmethod, staticmethod)
        if not isinstance(o, kinds) and (not callable(o) or any(o is c for c in commands)): continue
        n += 1
        if not Documented(o, name).docs: silent.append(f'{module}.{name}')
        if not isinstance(o, (property, cached_property)): nameless += [f'{module}.{name}: {k}' for k in ParameterTable(o).missing]
    assert n > 500 and silent == [] and nameless == []


def test_every_option_of_a_command_says_what_it_is(docs):
    for name, f in docs('reference').commands().items():
        assert f.__doc__, name
        for o in docs('reference').options(f): assert len(o['about']) > 3, (name, o)


def test_tables_of_parameters_say_what_stands_elsewhere(docs):
    ParameterTable, signature = docs('showdoc').ParameterTable, docs('showdoc').signature

    class Old:
        def go(self, x, # Where to
               y=1, # How far
            ): "Go"

    class New(Old):
        def go(self, x, y=2, fast=False): # fast: at once; metres
            "Go"
    New.go.__module__ = __name__
    globals()['New'], New.go.__qualname__ = New, 'New.go'
    try: got = [(o[0], o[3]) for o in ParameterTable(New.go).rows]
    finally: del globals()['New']
    assert got == [('x', 'Where to'), ('y', 'How far'), ('fast', 'at once'), ('', 'metres')]
    assert signature('New.go', New.go) == 'New.go(x, y=2, fast=False)' and signature('New', New) == 'class New'

    def one(a, b): pass
    assert ParameterTable(one).missing == ['a', 'b']


# What is shown of a name

class Square:
    def __init__(self, side): self.side = side
    @property
    def area(self): # Square metres
        "How much it covers"
        return self.side**2
    @classmethod
    def unit(cls): return cls(1)


class Tile(Square): "It does not say how it is made"


@dataclass
class Shape:
    "What others extend"
    corners: int  # How many


@dataclass
class Grid(Shape):
    "It extends a dataclass"
    wide: int = 2  # Squares in a row
    def __repr__(self): return 'a grid'  # in place of one that Python made


def tally(*items, # What to count
          **names, # Name -> what it counts
    ): # How many in all
    return len(items) + len(names)


def scaled(x:float, # Seconds
           by:int|None=2, # Times
           **options, # Handed on
    )->float: # Seconds
    "`x`, scaled"


def both(x, by=3, times=1): # as for `scaled`; times: how often; seconds, as a list
    "`x`, scaled, again and again"


def begun(n, # How many
          unit='s', **options): pass


def handed(**options # For its class
    )->int: pass


class kept:
    def __init__(self, cls): # cls: A class
        pass


def cut(text, *, at=80): pass


def test_types_and_defaults_are_shown_as_one_types_them(docs):
    import inspect
    from typing import Optional
    from fastbench.command.options import Precision
    from fastbench.recipe import Recipe
    from fastbench.runs.record import Run
    S = docs('showdoc')
    kinds = Optional[Recipe], int|str, inspect.Parameter.empty, type(None)
    assert [S.type_name(o) for o in kinds] == ['Recipe|None', 'int|str', '', '']
    assert S.made_anew(Run)['data'] == {} and S.made_anew(Run)['epochs'] == [] and S.made_anew(int) == {}
    assert S.default_name(print) == 'print' and S.default_name('fp32') == "'fp32'"
    assert S.default_name(inspect.Parameter.empty) == ''
    assert S.default_name(list(range(100))) == '...' and S.default_name((0, 1)) == '(0, 1)'
    assert [S.default_name(o) for o in (Precision.half_bf16, 4, None, Run)] == ["'half-bf16'", '4', 'None', 'Run']


def test_where_parameters_are_described(docs):
    from fastbench.compare.runs import Compared
    from fastbench.recipe import Recipe
    S = docs('showdoc')
    assert S.plain_function(vars(Square)['unit']) is Square.unit.__func__ and S.plain_function(len) is len
    assert S.documented(Square) is Square.__init__ and S.documented(Recipe) is Recipe and S.documented(Tile) is None
    assert S.ending(tally) == 'How many in all' and S.ending(len) == ''
    assert S.overridden(S.plain_function(Compared)) == [] and S.overridden(len) == []
    assert [o.__qualname__ for o in S.overridden(Compared.shown)] == ['Table.shown']
    assert S.parts('Seconds: of the fit', ['n']) == ({}, [], 'Seconds: of the fit')
    got = S.parts('n: how many; as for `scaled`; seconds, as a list', ['n', 'text'])
    assert got == ({'n': 'how many'}, ['scaled'], 'seconds, as a list')


def test_tables_of_parameters(docs):
    T = docs('showdoc').ParameterTable
    def what(f): return [(o[0], o[3]) for o in T(f).rows]
    assert what(tally) == [('*items', 'What to count'), ('**names', 'Name -> what it counts'), ('', 'How many in all')]
    assert what(handed) == [('**options', 'For its class'), ('', '')], 'the comment above is not of the result'
    assert what(Grid.__repr__) == []
    assert what(Grid) == [('corners', 'How many'), ('wide', 'Squares in a row')]
    assert T(kept).rows == [('cls', '', '', 'A class')]
    assert T(begun).missing == ['unit'], '**options may be handed on without a word'
    assert T(begun).rows == [('n', '', '', 'How many'), ('unit', 'str', "'s'", ''), ('**options', '', '', '')]
    assert [o[3] for o in T(both).rows] == ['Seconds', 'Times', 'how often', 'seconds, as a list']
    assert not T(scaled).missing and T(scaled).rows[-1] == ('', 'float', '', 'Seconds')
    cell, code = docs('convert').cell, docs('convert').code
    assert cell('') == code('') == '' and cell(r'a\|b') == r'a\|b', 'escaped once'
    assert cell('on|off') == r'on\|off' and cell(code('int|None')) == r'`int\|None`'
    assert str(T(scaled)) == r"""| Name | Type | Default | What |
| --- | --- | --- | --- |
| `x` | `float` |  | Seconds |
| `by` | `int\|None` | `2` | Times |
| `**options` |  |  | Handed on |
| *returns* | `float` |  | Seconds |"""


def test_signatures(docs):
    from fastbench.recipe import Recipe
    signature = docs('showdoc').signature
    assert signature('scaled', scaled) == 'scaled(x, by=2, **options)'
    assert signature('cut', cut) == 'cut(text, *, at=80)'
    assert signature('Square.area', Square.area) == 'Square.area'
    assert signature('Square.unit', Square.unit) == signature('Square.unit', vars(Square)['unit']) == 'Square.unit()'
    assert signature('Square', Square) == 'class Square(side)' and signature('Tile', Tile) == 'class Tile'
    lines = signature('Recipe', Recipe).splitlines()
    assert lines[0] == 'class Recipe(' and max(map(len, lines)) <= 91
    assert lines[1] == "    name, about='', data='own', sample=1.0, workers=None, batches=None, bs=64,"


def test_a_name_with_docstring_and_table(docs):
    D = docs('showdoc').Documented
    code = '```python\n{}\n```\n\n'
    begin = code.format('scaled(x, by=2, **options)') + '`x`, scaled\n\n| Name | Type |'
    assert str(D(scaled, 'scaled')).startswith(begin)
    shown = code.format('Square.area') + 'How much it covers\n\n*Property:* Square metres'
    assert str(D(Square.area, 'Square.area')) == shown
    assert D(Tile, 'Tile').docs.startswith('It does') and D(type('Plain', (Square,), {}), 'Plain').docs == ''


def test_names_that_a_source_makes_public(docs):
    def made(source, *known): return list(docs('showdoc').public_names(source, known))
    assert made('a,b = 1,2\nTable.wide = True\nc:int = 3', 'a', 'b', 'c', 'Table') == ['a', 'b', 'Table.wide', 'c']
    assert made('@patch_to(Wall, as_prop=True)\ndef f(self): pass') == ['Wall.f']
    assert made('def _help(): pass\ndef run(): pass', 'run') == ['run']
    assert made('@patch_to(Wall)\ndef crack(self): "It shows"\ndef local(): pass', 'Wall') == ['Wall.crack']
    source = '''
@patch
def paint(self:Wall, colour): "Paint it"
class Door:
    def open(self): "Open it"
    def _creak(self): "Nobody's business"
KEY,_key = 1,2
'''
    assert made(source, 'Door', 'KEY') == ['Wall.paint', 'Door', 'Door.open', 'KEY']
    lookup = docs('showdoc').lookup
    assert isinstance(lookup('fastbench.runs.record', 'Run.headline'), property)
    assert lookup('fastbench.recipe', 'but').__name__ == 'but'
    assert lookup('fastbench.ladders', 'Ladder.recipes').__doc__.startswith('The recipes')


def test_nbdev_shows_a_name_without_running_a_cell(docs):
    from fastcore.nbio import mk_cell, new_nb
    nb = new_nb([mk_cell('#| default_exp recipe'), mk_cell('show_doc(but)')])
    show = docs('showdoc').ShowDocs(nb)
    for c in nb.cells: show(c)
    shown = nb.cells[1]
    assert shown.cell_type == 'markdown' and shown.source.startswith('### but') and 'outputs' not in shown


# The converter, on notebooks made for it

@pytest.fixture
def convert(docs, tmp_path):
    "convert(cells) -> text for the site, text of the twin, pictures"
    from fastcore.nbio import mk_cell, new_nb, write_nb
    make, C, N = docs('make'), docs('convert'), docs('names')

    def _convert(*cells, page='tutorials/a.md'):
        (tmp_path/'nbs/tutorials').mkdir(parents=True, exist_ok=True)
        for path, title in (('nbs/tutorials/01_a.ipynb', 'A'), ('nbs/tutorials/02_b.ipynb', 'B')):
            made = [mk_cell(f'# {title}\n\n> sub', 'markdown')]
            for src, outs in cells:
                made.append(mk_cell(src, 'markdown' if outs is None else 'code'))
                if outs is not None: made[-1]['outputs'] = outs
            write_nb(new_nb(made), tmp_path/path)
        books = make.books_of(tmp_path)
        assert [b.page for b in books] == ['tutorials/a.md', 'tutorials/b.md']
        pictures = C.Pictures(), C.Pictures()
        return (*C.notebook(books[0].path, page, N.Names(books, tmp_path, {'CHANGELOG.md': 'changelog.md'}, {'run': None}, {'digits-xresnet18'}), pictures), pictures[0])
    return _convert


def out(**data): return dict(output_type='display_data', metadata={}, data={k.replace('_', '/'): v for k, v in data.items()})


def said(text): return dict(output_type='stream', name='stdout', text=text)


def test_hidden_cells_and_directives(convert):
    site, twin, _ = convert(('#| hide\nsecret', [said('hidden')]), ('#| eval: false\n1+1', [out(text_plain='2')]), ('#| echo: false\nquiet()', [out(text_plain='loud')]),
                            ('#| output: false\nshown()', [out(text_plain='unseen')]), ('!fastbench run 2>/dev/null | cat', [said('\x1b[1mran\x1b[0m\n')]),
                            ('x = 1\ny = 2 #| hide_line', []), ('', [dict(output_type='stream', name='stderr', text='noise')]))
    for text in (site, twin):
        assert not any(o in text for o in ('secret', 'hidden', 'quiet', 'unseen', '#|', 'y = 2', 'noise', '\x1b', '2>/dev')) and all(o in text for o in ('1+1', 'loud', 'shown()', 'ran', 'x = 1'))
    assert '```sh\nfastbench run\n```' in site and '```{.text .output}\n2\n```' in site and '```\n2\n```' in twin


def test_callouts(convert):
    site, twin, _ = convert((':::{.callout-tip title="Try it"}\none\n\ntwo\n:::\nafter', None), ('::: {.callout-warning}\nhot\n:::', None))
    assert '!!! tip "Try it"\n\n    one\n\n    two\n\nafter' in site and '!!! warning "Warning"\n\n    hot' in site and ':::' not in site + twin
    assert '> **Try it**\n>\n> one\n> \n> two' in twin


def test_links_between_notebooks_and_names(convert):
    site, _, _ = convert(('[b](02_b.ipynb#Part-2) [c](../../CHANGELOG.md) [d](https://a.b/c) [e](#x) `fastbench run x` `digits-xresnet18` [`fastbench run`](#x) `nothing`\n```\n[b](02_b.ipynb)\n```', None))
    assert '[b](b.md#part-2) [c](../changelog.md) [d](https://a.b/c) [e](#x) [`fastbench run x`](../reference/commands.md#fastbench-run) [`digits-xresnet18`](../reference/recipes.md#digits-xresnet18) [`fastbench run`](#x) `nothing`' in site
    assert '```\n[b](02_b.ipynb)\n```' in site


def test_pictures_and_html(convert):
    import base64
    png = base64.b64encode(b'a picture').decode()
    site, twin, files = convert(('#| fig-alt: A bar\nplot()', [out(image_png=png, text_plain='<Axes>')]), ('draw(x);', [out(image_png=png)]),
                                ('df', [out(text_html='<div>\n<style scoped>\n th {}\n</style>\n<table border="1" style="x"><td>a</td>\n</table></div>', text_plain='a')]),
                                ('page', [out(text_html='<iframe srcdoc="&lt;p&gt;hi" style="x"></iframe>', text_plain='a page')]))
    assert '![A bar](../pictures/tutorials-a-1.png)' in site and '![What draw(x) draws](../pictures/tutorials-a-2.png)' in twin and '<Axes>' not in site
    assert '<div class="output html"><div><table><td>a</td></table></div></div>' in site and '<table' not in twin and '```\na\n```' in twin
    assert files['pictures/tutorials-a-3.html'] == b'<p>hi' and '<iframe class="page"' in site and 'a page' in twin


def test_lists_as_notebooks_write_them(convert):
    site, twin, _ = convert(('text\n- one\n  - two\n- three', None))
    assert 'text\n\n- one\n    - two\n- three' in site and 'text\n- one\n  - two' in twin


def test_sections_come_with_their_notebooks(docs, tmp_path):
    "None now, some later: both have to work"
    make = docs('make')
    (tmp_path/'nbs/tutorials').mkdir(parents=True)
    for o in ('nbs/index.ipynb', 'nbs/02_recipe.ipynb'): shutil.copy(ROOT/o, tmp_path/o)
    for o in ('docs', 'fastbench', 'benchmarks'): (tmp_path/o).symlink_to(ROOT/o)
    for o in ('CHANGELOG.md', 'CONTRIBUTING.md'): shutil.copy(ROOT/o, tmp_path/o)
    none = make.Site(tmp_path)
    assert [list(o)[0] for o in none.nav] == ['Home', 'Reference', 'Changelog'] and 'tutorials/index.md' not in none.texts
    shutil.copy(ROOT/'nbs/index.ipynb', tmp_path/'nbs/tutorials/01_profile.ipynb')
    some = make.Site(tmp_path)
    assert some.nav[1] == {'Tutorials': ['tutorials/index.md', {'fastbench': 'tutorials/profile.md'}]} and 'tutorials/profile.md' in some.texts
    assert '- [fastbench](profile.md): Shows where' in some.texts['tutorials/index.md'] and '](tutorials/profile.md)' in some.llms


# nbdev's own builder

def test_nbdev_docs_processes_every_notebook(docs, tmp_path, monkeypatch):
    "What `nbdev-docs` does before it calls Quarto, with the files that are kept for it"
    import nbformat
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs
    for o in ('pyproject.toml', 'settings.ini'): shutil.copy(ROOT/o, tmp_path/o)
    for o in ('nbs', 'fastbench'): shutil.copytree(ROOT/o, tmp_path/o, ignore=shutil.ignore_patterns('__pycache__', '.*', 'fastbench-runs', 'models'))
    monkeypatch.chdir(tmp_path)
    kept = {o: (tmp_path/'nbs'/o).read_text() for o in ('_quarto.yml', 'nbdev.yml')}
    refresh_quarto_yml()
    assert {o: (tmp_path/'nbs'/o).read_text() for o in kept} == kept and 'output-dir: _docs' in kept['nbdev.yml']
    assert (tmp_path/'nbs/styles.css').exists()
    cache = proc_nbs('nbs', force=True, n_workers=0)
    assert {o.relative_to(cache) for o in cache.rglob('*.ipynb')} == {o.relative_to(ROOT/'nbs') for o in NOTEBOOKS} and (cache/'_quarto.yml').exists()
    for path in cache.rglob('*.ipynb'):
        nb = json.loads(path.read_text(encoding='utf-8'))
        nbformat.validate(nb)
        code = [''.join(c['source']) for c in nb['cells'] if c['cell_type'] == 'code']
        assert not [c for c in code if re.search(r'^show_doc\(|^#\| *export|nbdev_export\(\)', c, re.M)], path.name
    text = ''.join(''.join(c['source']) for c in json.loads((cache/'compare/03_runs.ipynb').read_text())['cells'])
    assert '### compare\n\n```python\ncompare(' in text and '| `threshold` | `float` | `0.01` | A share: a difference up to this does not matter |' in text


# What pages tell to type

def _prose(path): return '\n'.join(''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'markdown')


def _misused(line):
    "What the command line says to `line`, without running anything; '' if it understands it"
    import shlex
    import typer
    from fastbench.cli import app
    from fastbench.errors import UserError
    args = shlex.split(re.split(r'[|>]', line)[0])[1:]
    group = typer.main.get_command(app)
    if args[0] not in group.commands: return f'no command {args[0]}'
    try: group.commands[args[0]].make_context(args[0], args[1:])
    except UserError: return ''
    except Exception as e: return '' if type(e).__name__ == 'Exit' else getattr(e, 'message', '') or repr(e)  # Exit: --help
    return ''


def test_every_command_in_the_text_is_one():
    seen = []
    for path in NOTEBOOKS:
        text = _prose(path)
        shell = '\n'.join(re.findall(r'^```sh\n(.*?)^```', text, re.S | re.M))
        for line in re.findall(r'`(fastbench [a-z-]+ [^`\n]*--[^`\n]*)`', text) + re.findall(r'^(fastbench [a-z-]+[^#\n]*)', shell, re.M):
            assert not (why := _misused(line.strip())), f'{path.name}: {line}: {why}'
            seen.append(line)
    assert len(seen) >= 10
    assert 'uch option' in _misused('fastbench ab digits-xresnet18 --fail-over 5%') and 'no command' in _misused('fastbench gate x')


def test_the_help_of_every_command_ends_with_an_example():
    import typer
    from typer.testing import CliRunner
    from fastbench.cli import app

    def every(group, before=()):
        for k, o in group.commands.items(): yield from ((*before, k), *every(o, (*before, k))) if hasattr(o, 'commands') else ((*before, k),)
    names = list(every(typer.main.get_command(app)))
    assert ('run',) in names and ('cache', 'list') in names
    for name in names:
        told = CliRunner().invoke(app, [*name, '--help']).output.rstrip().split('\n\n')[-1].splitlines()
        assert told[0].strip() == 'Example:' and len(told) > 1, (name, told)
        for line in told[1:]: assert line.split()[:1+len(name)] == ['fastbench', *name][:len(line.split())] and not _misused(line), line


def test_the_workflow_for_pull_requests_is_one():
    import yaml
    text = re.search(r'^```yaml\n(.*?)^```', _prose(ROOT/'nbs/tutorials/07_pull_request.ipynb'), re.S | re.M)[1]
    flow = yaml.safe_load(text)
    assert flow[True] == 'pull_request'  # YAML 1.1 reads `on` so
    steps = flow['jobs']['speed']['steps']
    assert all(('uses' in o) != ('run' in o) for o in steps)
    train = next(o['run'] for o in steps if o.get('run', '').startswith('fastbench '))
    assert '--against' in train and not _misused(re.sub(r'\$\{\{.*?\}\}|>>.*', 'x', train).removesuffix('x').strip())
    assert not _misused('fastbench ab digits-xresnet18 --python main --python pull-request')


def test_outputs_of_tutorials_are_from_a_quiet_machine():
    "A Run says itself whether the machine was busy: run the notebook again when it is not"
    for path in [*sorted((ROOT/'nbs/tutorials').glob('*.ipynb')), ROOT/'nbs/index.ipynb']:
        cells = json.loads(path.read_text())['cells']
        outputs = json.dumps([c.get('outputs', []) for c in cells])
        assert not re.findall('busy machine|other programs used', outputs), path.name


def test_no_placeholder_is_left():
    "A fence or a paragraph that is one word in capitals"
    left = [(o.name, m[0]) for o in NOTEBOOKS for c in json.loads(o.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'markdown' for m in re.finditer(r'^(?!NVIDIA$)[A-Z_]{4,}$', ''.join(c['source']), re.M)]
    assert left == []


def test_tables_of_a_notebook_get_a_picture(browser, tmp_path):
    path, png = tmp_path/'a.ipynb', b'\x89PNG\r\n'
    outputs = [{'output_type': 'display_data', 'metadata': {}, 'data': {k: o}} for k, o in (('text/html', '<table><tr><td>12.5 ms</table>'), ('text/plain', '12.5 ms'))]
    path.write_text(json.dumps(dict(nbformat=4, nbformat_minor=5, metadata={}, cells=[dict(cell_type='code', id='a', metadata={}, execution_count=None, source='', outputs=outputs)])))
    done = subprocess.run([sys.executable, ROOT/'docs'/'picture.py', path], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    table, text = (o['data'] for o in json.loads(path.read_text())['cells'][0]['outputs'])
    assert base64.b64decode(table['image/png']).startswith(png) and 'text/html' in table and list(text) == ['text/plain']


def test_no_picture_without_a_browser(tmp_path):
    pytest.importorskip('playwright', reason='playwright is not installed: it comes with the extra dev')
    done = subprocess.run([sys.executable, ROOT/'docs'/'picture.py', tmp_path/'a.ipynb'], env=dict(os.environ, PATH=''), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith('none of chromium, ') and done.stderr.count('\n') == 1
