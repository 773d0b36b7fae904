"The report: every kind of Run on a page that asks nobody for anything, in which hostile texts stay text, seen by a real browser."
import csv
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

import pytest
from fastcore.xml import to_xml

from fastbench.page.charts import extremes, plot_accuracy, plot_distribution, plot_memory, plot_phases, plot_timeline, slow_steps, steps_of
from fastbench.machine.download import DataUnavailable
from fastbench.page import details
from fastbench.page.html import clean, csv_text, drawn, file_name
from fastbench.page.raw import Seen, epochs_csv, fields, shared_fields
from fastbench.measure.phases import Profile, to_dict
from fastbench.measure.table import seconds
from fastbench.compare.runs import compare
from fastbench.errors import UserError
from fastbench.recipe import Recipe
from fastbench.runs.record import Run
from fastbench.page.report import check_page, report
from fastbench.runs.store import save


def made(i=0, side=0, n=40, scale=1., status='ok', name='digits-xresnet18', precision='fp32', profile=True, valid=True, warm=1, accuracy=.9, keep=2**16, epochs=2, **kw):
    "A Run of made up steps; pair `i`, of which `side` is one"
    r, p = random.Random(f'{i}/{side}'), Profile(keep)
    noise = math.exp(r.gauss(0, .005))
    for phase, parts in (('train', dict(draw=.004, forward=.03, backward=.06, opt_step=.01)), ('valid', dict(draw=.004, predict=.03))):
        for j in range(n if phase == 'train' else n//4*valid):
            row = {k: v*scale*noise*math.exp(r.gauss(0, .02))*(20 if j < warm else 3 if j == n//2 else 1) for k, v in parts.items()}
            row |= dict(step=sum(row.values()), samples=64., warmup=float(j < warm))
            p.steps[phase].add([row.get(c, 0.) for c in p.steps[phase].columns])
    total = .1*n*scale*noise or .001
    for k in ('fit', *['epoch']*epochs): p.fit[k].add([total/(epochs if k == 'epoch' else 1)])
    p.peaks.append(dict(host=8e8*scale, host_exact=True))
    values = [dict(train_loss=1/(j+1), valid_loss=1/(j+1), accuracy=accuracy + r.gauss(0, .003)) for j in range(epochs)]
    return Run(**{**dict(recipe={**vars(Recipe(name)), 'seed': 42+i, 'precision': precision}, id=f'{name}-20260101T00{i:02}{side}0-{side:04x}{i:04x}', started='2026-01-01T00:00:00+00:00', seconds=total,
                         profile=to_dict(p) if profile else None, seed=42+i, repeat=i, status=status, epochs=values, metrics=values[-1] if values else {}, weights=f'random, seed {42+i}', data=dict(name='digits', version='1', n_train=1438),
                         precision=dict(asked=precision, effective=precision), device=dict(kind='cpu', name='EPYC', memory=1), environment=dict(os='Debian', host='aaaa', python='3.11.7', versions=dict(torch='2.15.0'))), **kw})


def texts(): return made(name='docstrings-distilbert', data=dict(name='docstrings', synthetic=True, fallback='imdb'), precision='fp32')


def unbuilt(): return made(1, status='failed', error='RuntimeError: no memory', profile=False, data={}, weights='', precision='fp32', epochs=0, seconds=None)


def gpu():
    run = made()
    run.profile['device'] = {'train': run.profile['steps']['train']}
    run.profile['peaks'] = [dict(host=8e8, host_exact=False, device=3e10)]
    return run


MANY = [made(i, s, scale=1.2 if s else 1, precision='bf16' if s else 'fp32') for i in range(5) for s in (0, 1)]
CASES = dict(
    ok=lambda: report(made()), no_profile=lambda: report(made(profile=False)), diverged=lambda: report(made(status='diverged', seconds=None)), unbuilt=lambda: report([made(), unbuilt()]),
    failed=lambda: report(made(status='failed', error='boom', traceback='a\n  b'*30)), interrupted=lambda: report(made(status='interrupted', n=7, epochs=0, valid=False)), texts=lambda: report(texts()),
    repeats=lambda: report([made(i) for i in range(3)]), pairs=lambda: report(MANY, on='precision'), not_comparable=lambda: report(MANY), anyway=lambda: report(MANY[1::2], against=MANY[::2], anyway=True),
    recipes=lambda: report([*MANY[:4], texts(), gpu()]), no_steps=lambda: report(made(n=0)), one_step=lambda: report(made(n=1, valid=False)), one_cold_step=lambda: report(made(n=1, warm=0)), gpu=lambda: report(gpu()),
    long=lambda: report(made(n=3000), raw=1000), crowd=lambda: report([made(i, s, n=5, name=f'r{s}') for i in range(4) for s in range(8)]))


@pytest.fixture(scope='module')
def html(tmp_path_factory):
    "Pages by the names of their cases, each written once"
    folder, there = tmp_path_factory.mktemp('a folder'), {}
    def _html(name):
        if name not in there: there[name] = CASES[name]().save(folder/f'{name}.html')
        return there[name]
    return _html


def test_cards_say_what_differs():
    "Not only the batch and the precision, which stand above"
    sides = [made(i, s, recipe={**vars(Recipe('digits-xresnet18')), 'seed': 42+i, 'precision': 'fp32', 'bs': 32*(s+1), 'lr': .1*(s+1), 'opt': 'sgd'}) for i in range(2) for s in (0, 1)]
    text = report(sides[::2], against=sides[1::2], on=['lr', 'bs']).html
    assert re.findall(r'class="sub unlike">(.*?)</p>', text, re.S) == ['<bdi>lr 0.2</bdi>', '<bdi>lr 0.1</bdi>']
    assert 'unlike' not in re.sub('<style>.*?</style>', '', report([made(i) for i in range(3)]).html, flags=re.S)


def test_a_page_of_hundreds_of_runs(monkeypatch):
    "Each field of each Run is looked at once, and the table of what differs stays readable"
    html, looks = report([*(made(i, n=2) for i in range(60)), made(n=2, name='another')]).html, []
    assert '>A39</th>' in html and '>A40</th>' not in html and '>B1</th>' in html and '>The first 40 of 61 Runs. They are taken from each side in turn. The file of the Runs has all.<' in html
    class Counted(dict):
        def get(self, k):
            looks.append(k)
            return super().get(k)
    monkeypatch.setattr('fastbench.page.raw.fields', lambda i: Counted(same=1, seed=i))
    same, other = shared_fields(range(50))
    assert same == dict(same=1) and other == dict(seed=[*range(50)]) and len(looks) == 100


# In a browser

@pytest.mark.parametrize('name', CASES)
def test_page_asks_nobody_and_fits_a_phone(html, visit, name):
    path = html(name)
    for width, dark in ((390, False), (390, True), (1280, False)):
        v = visit(path, width, dark=dark)
        v.open_all()
        assert v.requests == [v.url] and v.console == [] and v.overflow <= 0, (width, v.requests, v.console, v.overflow)
    assert v.evaluate('[...document.querySelectorAll("h2")].map(o => o.textContent)')[0] == 'At a glance'
    wide = v.evaluate('[...document.querySelectorAll("svg")].filter(o => o.parentElement.scrollWidth > o.parentElement.clientWidth + 1).length')
    assert wide == 0


@pytest.mark.parametrize('name', ['pairs', 'not_comparable', 'unbuilt', 'recipes', 'gpu'])
@pytest.mark.parametrize('dark', [False, True])
def test_all_text_has_contrast(html, visit, name, dark):
    v = visit(html(name), dark=dark)
    v.open_all()
    got = v.contrasts()
    assert len(got) > 100 and not [o for o in got if o[1] < 4.5]
    back = v.evaluate('getComputedStyle(document.body).backgroundColor')
    assert (sum(map(int, re.findall(r'\d+', back)[:3])) < 200) == dark


@pytest.mark.parametrize('name', ['pairs', 'ok', 'gpu'])
def test_pictures_say_what_they_show(html, visit, name):
    v = visit(html(name))
    svgs = v.evaluate('[...document.querySelectorAll("svg")].map(o => [o.getAttribute("role"), document.getElementById(o.getAttribute("aria-labelledby"))?.textContent, o.querySelectorAll("path").length])')
    assert len(svgs) > 3 and all(role == 'img' and len(alt) > 20 and n for role, alt, n in svgs)
    assert v.evaluate('document.querySelectorAll("img, canvas, object, iframe").length') == 0
    ids = v.evaluate('[...document.querySelectorAll("[id]")].map(o => o.id)')
    assert len(ids) == len(set(ids))
    dead = v.evaluate('[...document.querySelectorAll("use, [clip-path]")].map(o => (o.getAttribute("href") || o.getAttribute("clip-path")).replace(/^url\\(#|^#|\\)$/g, "")).filter(o => !document.getElementById(o))')
    assert dead == []
    assert v.get_by_role('img').count() == len(svgs)


def test_text_in_pictures_is_whole_and_does_not_overlap(html, visit):
    for name in ('pairs', 'ok', 'gpu', 'long', 'crowd', 'one_step'):
        v = visit(html(name), 390)
        hits = v.evaluate("""() => [...document.querySelectorAll('svg')].flatMap(svg => {
          const ts = [...svg.querySelectorAll('text')].map(o => [o.textContent, o.getBoundingClientRect()]), res = [];
          for (const [i, [a, p]] of ts.entries()) for (const [b, q] of ts.slice(i+1))
            if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3) res.push([a, b]);
          return res })""")
        assert hits == [], (name, hits)
        cut = v.evaluate('''[...document.querySelectorAll("svg")].flatMap(svg => { const b = svg.getBoundingClientRect();
          return [...svg.querySelectorAll("text")].filter(o => { const p = o.getBoundingClientRect(); return p.left < b.left-2 || p.right > b.right+2 || p.top < b.top-2 || p.bottom > b.bottom+2 }).map(o => o.textContent) })''')
        assert cut == [], (name, cut)


def test_keyboard_reaches_links_details_and_tables(html, visit):
    v = visit(html('pairs'))
    every = v.evaluate('[...document.querySelectorAll("a[href], summary, .box")].filter(o => !o.closest("details:not([open])") || o.tagName == "SUMMARY").length')
    seen = set()
    for i in range(every + 3):
        v.keyboard.press('Tab')
        seen.add(v.evaluate('[...document.querySelectorAll("*")].indexOf(document.activeElement)'))
        if v.evaluate('document.activeElement.tagName') == 'SUMMARY' and not v.evaluate('document.activeElement.parentElement.open'):
            assert v.evaluate('getComputedStyle(document.activeElement).outlineStyle') == 'solid'
            if v.evaluate('document.querySelectorAll("details[open]").length') == 0:
                v.keyboard.press('Enter')
                assert v.evaluate('document.activeElement.parentElement.open')
                v.keyboard.press('Enter')
    kinds = v.evaluate('(is) => { const all = [...document.querySelectorAll("*")]; return is.filter(i => all[i] && all[i].matches("a[href], summary, .box")).length }', list(seen))
    assert kinds == every > 10
    v.keyboard.press('Home')
    v.get_by_role('link', name='Raw data').focus()
    v.keyboard.press('Enter')
    assert v.page.url.endswith('#raw')


def test_downloads_are_whole(html, visit, tmp_path):
    v = visit(html('pairs'))
    links = v.get_by_role('list').last.get_by_role('link')
    names = []
    for o in links.all():
        with v.expect_download() as got: o.click()
        got.value.save_as(tmp_path/got.value.suggested_filename)
        names.append(got.value.suggested_filename)
    assert names == [f'digits-xresnet18-{o}.csv' for o in ('runs', 'epochs', 'steps')] and v.console == []
    rows = {o: list(csv.DictReader(io.StringIO((tmp_path/f'digits-xresnet18-{o}.csv').read_text('utf-8')))) for o in ('runs', 'epochs', 'steps')}
    assert [len(rows[o]) for o in rows] == [10, 20, 10*(40+10)]
    run = MANY[3]
    mine = [float(o['step_seconds']) for o in rows['steps'] if o['id'] == run.id and o['phase'] == 'train']
    assert mine == run.profile['steps']['train']['values']['step'] and {o['recipe.name'] for o in rows['runs']} == {'digits-xresnet18'}


def test_policy_refuses_what_is_slipped_in(html, visit):
    v = visit(html('ok'))
    v.evaluate("""() => { document.body.insertAdjacentHTML('beforeend', '<p id="x" style="color:red">x</p><style>#x{color:red}</style><img src="http://127.0.0.1:9/x.png"><img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=" onerror="window.pwned=1" onload="window.pwned=1"><iframe src="http://127.0.0.1:9/"></iframe>') }""")
    def refused(): return [o for o in v.console if 'Content Security Policy' in o]
    for _ in range(300):  # until all of it was looked at
        v.wait_for_timeout(200)
        if len(refused()) >= 5: break
    assert not [o for o in v.requests if '127.0.0.1' in o and not refused()]
    assert v.evaluate('window.pwned') is None and v.evaluate('getComputedStyle(document.querySelector("#x")).color') != 'rgb(255, 0, 0)'
    assert len(refused()) >= 5


def test_notebook_shows_it_boxed_in(visit, tmp_path):
    path = tmp_path/'nb.html'
    path.write_text('<!DOCTYPE html><style>h1{color:red}</style>' + report(made(), title='"quoted" <b>')._repr_html_())
    v = visit(path)
    frame = v.page.frames[1]
    assert frame.locator('h1').inner_text() == '"quoted" <b>' and frame.evaluate('getComputedStyle(document.querySelector("h1")).color') != 'rgb(255, 0, 0)'
    assert v.requests[0] == v.url and all(o.startswith('about:') for o in v.requests[1:]) and v.console == []
    with v.page.expect_download(): frame.get_by_role('link', name='steps.csv').click()


# Hostile texts

EVIL = ['<script>window.pwned=1</script>', '</svg><img src=x onerror="window.pwned=1">', '\' " onload=alert(1) x="', ']]><!-- --><![CDATA[', r'$\mathregular{x}$ $\frac \$', 'a\nb\r\nc\td', '\u202eאבגד\u202c', '😀👩‍👩‍👧',
        '</style><style>*{display:none}</style>', '</title></bdi></td></table><h1>', '\x00\x1b[31m\x7f', '\ud800', '&lt;b&gt;&amp;', '{{7*7}}', 'javascript:alert(1)', '%3Cscript%3E']


def poison(o, evil, at, keys):
    "`o` with every text in it replaced, names of free dicts, too; what it now holds is written to `at`"
    def new():
        at.append(f'{evil} #{len(at)}')
        return at[-1]
    if isinstance(o, str): return new()
    if isinstance(o, dict): return {(new() if keys and k not in ('asked', 'effective', 'name') else k): poison(v, evil, at, keys) for k, v in o.items()}
    return [poison(v, evil, at, keys) for v in o] if isinstance(o, list) else o


def hostile(evil, i=0):
    "A Run with `evil` in every field"
    at, run = [], made(i, asked=dict(bs=1), traceback='t', test=dict(loss=.1), extra=dict(note=dict(joules=1)), warnings=['w', 'v'], error='e')
    run.recipe = poison(run.recipe, evil, at, False) | {f'{evil} recipe': 1}
    for k in ('data', 'device', 'environment', 'precision', 'epochs', 'metrics', 'asked', 'test', 'extra'): setattr(run, k, poison(getattr(run, k), evil, at, True))
    for k in ('id', 'started', 'weights', 'error', 'traceback'): setattr(run, k, f'{evil} {k}{i}'); at.append(getattr(run, k))
    run.warnings = poison(run.warnings, evil, at, False)
    run.profile['facts'], run.profile['peaks'] = {f'{evil} fact': f'{evil} value'}, [dict(host=8e8, host_exact=True, note=f'{evil} peak')]
    return run, at + [f'{evil} {o}' for o in ('recipe', 'fact', 'value', 'peak')]


ALLOWED = set('HTML HEAD META TITLE STYLE BODY HEADER H1 H2 H3 P BDI NAV A MAIN SECTION DIV SPAN DL DT DD FIGURE FIGCAPTION TABLE THEAD TBODY TR TH TD UL LI DETAILS SUMMARY STRONG CODE FOOTER '
              'svg title g path use text tspan defs clipPath rect'.split())
ATTRS = set('lang charset http-equiv content name class id href aria-label aria-labelledby role tabindex scope download viewBox d x y width height transform fill fill-opacity fill-rule opacity stroke stroke-width stroke-opacity '
            'stroke-dasharray stroke-dashoffset stroke-linejoin stroke-linecap stroke-miterlimit font-size font-weight text-anchor clip-path open'.split())


def squeezed(text): return ' '.join(text.split())


@pytest.mark.parametrize('evil', [' '.join(EVIL), 'w'*400, *EVIL[:2], EVIL[4], '=cmd|" /C calc"!A0'], ids=['all', 'long word', 'script', 'svg', 'mathematics', 'formula'])
def test_hostile_texts_stay_text(visit, tmp_path, evil):
    (a, said), (b, more) = hostile(evil), hostile(evil, 1)
    b.status, b.recipe['name'] = 'failed', f'{evil} other'
    v = visit(report([a, b, made(2)], title=f'{evil} title').save(tmp_path/'r.html'), 390)
    assert v.requests == [v.url] and v.console == [] and v.evaluate('window.pwned') is None
    tags, attrs = v.evaluate('[[...new Set([...document.querySelectorAll("*")].map(o => o.tagName))], [...new Set([...document.querySelectorAll("*")].flatMap(o => o.getAttributeNames()))]]')
    assert set(tags) <= ALLOWED and set(attrs) <= ATTRS, (set(tags) - ALLOWED, set(attrs) - ATTRS)
    assert v.evaluate('document.querySelectorAll("style").length') == 1
    links = v.evaluate('[...document.querySelectorAll("a")].map(o => [o.getAttribute("href").slice(0, 10), o.getAttribute("download")])')
    assert all(h[:1] == '#' or h == 'data:text/' for h, _ in links) and all(re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]{0,99}', d) for _, d in links if d)
    page = squeezed(v.evaluate('document.body.textContent'))
    missing = [o for o in said + more + [f'{evil} other'] if squeezed(clean(o)) not in page]
    assert not missing, missing[:3]
    v.open_all()
    assert v.overflow <= 0


def test_hostile_texts_in_csv(tmp_path):
    for evil in ('=cmd|" /C calc"!A0', '@SUM(1)', '+1+1', '-1+1', '\t=1', '\r=1', ' =1'):
        html = report(hostile(evil)[0]).html
        for link in re.findall(r'data:text/csv;charset=utf-8,([^"\']*)', html):
            rows = list(csv.reader(io.StringIO(unquote(link))))
            assert len(rows) > 1 and len({len(r) for r in rows}) == 1
            assert not [c for r in rows for c in r if re.match(r'\s*[=+\-@]', c) and not re.fullmatch(r'[-+]?[\d.]+(e[-+]?\d+)?', c)]
    odd = 'a%41#b?c&d;e "f"\né'
    link = re.search(r'data:text/csv;charset=utf-8,([^"\']*)', report(made(weights=odd)).html)[1]
    assert '#' not in link and next(csv.DictReader(io.StringIO(unquote(link))))['weights'] == odd
    assert csv_text(['a'], [['-1.5e-3'], [-2], ['-2'], ['-2+3']]).split() == ['a', '-1.5e-3', '-2', '-2', "'-2+3"]


@pytest.mark.parametrize('text', ['../../etc/passwd', '/abs', 'C:\\x', '.hidden', '', '<>', 'a'*500, 'CON', '\u202egpj.exe', 'x\ny'])
def test_file_names_are_only_names(text): assert re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]{0,79}', file_name(text))


def test_labels_of_charts_are_no_mathematics():
    import matplotlib
    matplotlib.use('agg')
    import matplotlib.pyplot as plt
    bad = r'$\frac{a}{b$ \mathregular <b>'
    run = made()
    run.epochs = [{bad: .5}, {bad: .6}]
    assert bad.replace('<', '&lt;').replace('>', '&gt;') in to_xml(drawn(lambda ax: ax.set_title(bad), 2, 'a', 'x'), indent=False)
    for ax in (plot_phases([run, run], [bad, bad]), plot_distribution([run, run], [bad, bad]), plot_memory([run], [bad]), plot_accuracy([run, made()], bad, [bad, 'b'])):
        ax.figure.savefig(io.StringIO(), format='svg')
        plt.close(ax.figure)


# Without a browser

@pytest.mark.parametrize('name', CASES)
def test_the_same_runs_make_the_same_page(html, name):
    text = html(name).read_text('utf-8')
    if name in ('ok', 'pairs', 'gpu'): assert text == CASES[name]().html
    assert not re.search(r'<script|javascript:| on\w+=|style=|@import|url\((?!#)|<link|<base', text.split('</style>')[1]) and len(text) < 2_000_000
    assert 'http:' not in text and 'https:' not in text


def test_what_must_not_be_overlooked_is_said(html):
    def text(name): return html(name).read_text('utf-8')
    assert 'fallback data' in text('texts') and 'synthetic data' in text('texts') and 'docstrings in place of imdb' in text('texts')
    assert '1 failed' in text('unbuilt') and 'RuntimeError: no memory' in text('unbuilt') and '2 Runs, 1 side' in re.sub(r'<[^>]*>', '', text('unbuilt'))
    assert 'not a timing' in text('diverged') and 'Where the time goes' not in text('diverged') and 'no timing' in text('diverged')
    assert 'no profile' in text('no_profile') and 'only the time of the whole fit' in text('no_profile')
    assert 'Not comparable.' in text('not_comparable') and '<bdi>precision</bdi>' in text('not_comparable')
    assert 'NOT COMPARABLE' in text('anyway') and 'compared on purpose' in text('pairs')
    assert 'hollow: at least so much' in text('gpu')
    other = made()
    other.precision = dict(asked='bf16', effective='fp32')
    assert 'not the precision asked for' in report(other).html


def test_verdicts_are_those_of_compare():
    from fastbench.compare.runs import compare
    a, b = MANY[::2], MANY[1::2]
    r = report(b, against=a, on='precision')
    assert r.compared[0].rows == compare(a, b, on='precision').rows and r.compared[0].verdicts['overall', 'fit'].verdict == 'slower'
    assert [len(s.runs) for s in r.sides] == [5, 5] and r.sides[0].runs[0].id == a[0].id


def test_a_long_run_is_cut_and_says_so(html):
    text = html('long').read_text('utf-8')
    assert 'one in 4 of 3,750 steps' in text and 'drawn are the fastest and the slowest of each 12' in text
    steps = unquote(re.findall(r'data:text/csv;charset=utf-8,([^"\']*)', text)[2]).splitlines()
    assert len(steps) == 1 + 750 + 188
    run = made(n=3000, keep=1000, valid=False)
    assert run.profile['steps']['train']['stride'] > 1
    assert f"the Run kept one in {run.profile['steps']['train']['stride']}" in report(run).html


def test_pictures_of_many_runs_say_how_many_they_show(html):
    text = html('crowd').read_text()
    assert 'Peak memory. The first 24 of 32 Runs.' in text and 'Warm-up left out. The first 24 of 32 Runs.' in text and 'The first' not in html('repeats').read_text()
    assert 'The first 60 of 70 Runs.' in report([made(i, n=2) for i in range(70)]).html
    html = report([*(made(i, n=2) for i in range(70)), made(n=2, name='another')]).html
    for name, most in (('Time lines', 12), ('Peak memory', 24), ('Warm-up left out', 24), ('the seconds that it took', 60)):
        assert f'{name}. The first {most} of 71 Runs. They are taken from each side in turn.' in html, name
    said = re.findall('<title[^>]*>([^<]*)', html)
    for name in ('How long steps of training take', 'Peak memory', 'accuracy against seconds', 'Time line of B1'):
        assert any(o.startswith(name) and 'B1' in o for o in said), (name, said)


def test_a_card_and_the_comparison_say_the_same_seconds():
    a, b = ([made(i, o, scale=1 + .8*i) for i in range(6)] for o in (0, 1))
    c, page = compare(a, b), report(b, against=a).html
    cards = re.sub('<[^>]*>', ' ', re.search('id="glance">(.*?)</section>', page, re.S)[1])
    for key in (('overall', 'fit'), ('train', 'step'), ('train', 'samples/s')):
        r = next(c.shown(o) for o in c.rows if (o['phase'], o['action']) == key)
        assert f" {r['a']} " in cards and f" {r['b']} " in cards, (key, r['a'], r['b'], cards)


def test_no_extreme_is_lost():
    r = random.Random(0)
    for n in (1, 2, 499, 500, 501, 1000, 12345):
        xs = [r.random() for _ in range(n)]
        which, k = extremes(xs)
        assert len(which) <= 500 and which == sorted(set(which)) and max(xs) == max(xs[i] for i in which) and min(xs) == min(xs[i] for i in which)


def test_slow_steps_are_the_slow_ones():
    assert slow_steps([]) == [] and slow_steps([1.]) == [False] and not any(slow_steps([1.]*50))
    s = steps_of(made(n=40))
    assert [i for i, o in enumerate(s['slow']) if o] == [20] and [i for i, o in enumerate(s['warm']) if o] == [0]


@pytest.mark.parametrize('break_', [lambda p: p.update(steps=3), lambda p: p['steps']['train'].update(columns=['x']), lambda p: p['steps']['train']['values'].update(step=['a']), lambda p: p.update(peaks=5),
                                    lambda p: p.pop('fit'), lambda p: p.update(outside=[]), lambda p: p['steps']['train']['values'].update(step=[]), lambda p: p['fit']['epoch'].update(values=7),
                                    lambda p: p['steps']['train']['values'].update(step=[math.nan]*40), lambda p: p['fit'].update(fit=None)])
def test_one_broken_profile_does_not_lose_the_others(break_):
    good, bad = made(0), made(1)
    break_(bad.profile)
    html = report([good, bad]).html
    assert good.id in html and bad.id in html


def test_odd_values_where_nobody_looked():
    run = made(metrics=dict(accuracy=math.nan, f1=math.inf, note='text', flag=True, deep=dict(a=1)), warnings=[1, dict(a=2), None], seed=2**70, environment=dict(versions='none', git=[]), data=dict(name=['a'], fallback=dict(b=1)), device=dict(name=5))
    run.epochs, run.precision = [3, None, dict(accuracy='x')], dict(effective=3)
    assert run.id in report(run).html
    assert run.id in report([run, made(1)]).html


def test_users_matplotlib_stays_as_it_was():
    import matplotlib
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({'text.usetex': True, 'axes.facecolor': 'black', 'svg.fonttype': 'path'}): assert report(made()).html == report(made()).html
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({'axes.facecolor': 'black', 'lines.linewidth': 9}): odd = report(made()).html
    assert odd == report(made()).html


# Files and the command

def test_only_reports_are_replaced(tmp_path):
    r = report(made())
    for text in ('<p>a thesis', ' ', '<html><head>'):
        (tmp_path/'x.html').write_text(text)
        with pytest.raises(UserError, match='is not a report of fastbench'): r.save(tmp_path/'x.html')
        assert (tmp_path/'x.html').read_text() == text
    (tmp_path/'empty.html').touch()
    assert r.save(tmp_path/'empty.html') == r.save(tmp_path/'new'/'a.html').with_name('x').parent.parent/'empty.html'
    r.save(tmp_path/'new'/'a.html')
    with pytest.raises(UserError, match='is a folder'): r.save(tmp_path)
    with pytest.raises(UserError, match='is not a report'): report('no such run', out=tmp_path/'x.html')  # said before any work
    with pytest.raises(UserError, match='no report at'): r.save(tmp_path/'x.html'/'y.html')


@pytest.mark.skipif(os.name != 'posix', reason='permissions of POSIX')
@pytest.mark.parametrize('name', ['new.html', 'deep/er/new.html', 'old.html'])
def test_a_page_in_a_folder_without_permission_is_refused_before_the_work(name):
    with tempfile.TemporaryDirectory() as d:  # pytest's own folder is closed to others, and root may write anywhere
        Path(d, 'old.html').touch()
        os.chmod(d, 0o555)
        pid = os.fork()
        if not pid:
            if os.geteuid() == 0: os.setuid(65534)
            try: check_page(Path(d, name))
            except UserError as e: os._exit(7 if 'Permission denied. Name another file' in str(e) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        os.chmod(d, 0o755)
        assert check_page(Path(d, name)) == Path(d, name) and [o.name for o in Path(d).iterdir()] == ['old.html']


def test_what_cannot_be_reported(tmp_path):
    with pytest.raises(UserError, match='nothing to report'): report()
    with pytest.raises(UserError, match='nothing to report'): report([])
    with pytest.raises(UserError, match='stands on both sides'): report(MANY, against=MANY[0])
    with pytest.raises(UserError, match='unknown field'): report(MANY, on='presicion')
    with pytest.raises(DataUnavailable): report(tmp_path/'nowhere')
    with pytest.raises(UserError, match='int is not a side'): report(3)


def test_same_run_twice_is_one(): assert len(report(MANY[0], [MANY[0], MANY[2]]).runs) == 2


@pytest.fixture(scope='module')
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp('kept')
    for o in [*MANY, made(name='other')]: save(o, folder/'runs')
    (folder/'runs'/'cut.json').write_text('{"schema": 1')
    return folder


def command(*args, cwd):
    return subprocess.run([sys.executable, '-m', 'fastbench', 'report', *map(str, args)], capture_output=True, text=True, cwd=cwd, timeout=600)


def test_command(kept):
    got = command('digits', '--out', 'runs', '-o', 'a.html', '--on', 'precision', cwd=kept)
    assert (got.returncode, got.stderr) == (0, '') and got.stdout.startswith('a.html: Report of 10 Runs, 2 sides') and 'compared on purpose' in (kept/'a.html').read_text('utf-8')
    got = command('runs', '-o', 'b.html', '--title', 'All <of> them', cwd=kept)
    text = (kept/'b.html').read_text('utf-8')
    assert got.returncode == 0 and '11 Runs, 3 sides' in got.stdout and 'passed over' in text and 'All &lt;of&gt; them' in text
    got = command(MANY[1].id, '--against', MANY[0].id, '--out', 'runs', cwd=kept)
    assert got.returncode == 0 and 'Not comparable' in (kept/'report.html').read_text('utf-8')
    for args, code, said in ((['nope', '--out', 'runs'], 2, 'unknown Run'), (['x/nope'], 4, 'is not there'), (['--out', 'a.html'], 2, 'names the page'), (['--out', 'runs', '--on', 'x'], 2, 'unknown field'), (['--threshold', 'x'], 2, 'not a share')):
        got = command(*args, cwd=kept)
        assert got.returncode == code and said in got.stderr and len(got.stderr.splitlines()) == 1, got.stderr
    (kept/'report.html').write_text('mine')
    got = command('last', '--out', 'runs', cwd=kept)
    assert got.returncode == 2 and 'is not a report of fastbench' in got.stderr and (kept/'report.html').read_text() == 'mine'


def test_command_without_torch(kept):
    code = f"import sys; sys.argv = ['fastbench', 'report', 'last', '--out', 'runs', '-o', 'c.html']\nfrom fastbench.cli import main\ntry: main()\nfinally: print([o for o in ('torch', 'fastai', 'transformers', 'pandas') if o in sys.modules])"
    got = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=kept)
    assert got.returncode == 0 and got.stdout.splitlines()[-1] == '[]', got.stdout + got.stderr


# Sections and elements

def test_whatever_an_element_gets_is_text():
    "fastcore.xml escapes texts and nothing else: an error, bytes or a number of somebody's own go through its hands as they are"
    from fastcore.xml import to_xml
    from fastbench.page.html import h, table
    class Odd:
        def __str__(self): return '<b onload="x">'
    for o in (UserError('<b onload="x">'), b'<b onload="x">', Odd(), ['<b onload="x">'], ([Odd()], None)):
        attribute = [] if isinstance(o, (list, tuple)) else [h.p('a', title=o)]
        for got in (h.p(o), h.p('a', o), h.p(h.bdi(o)), table(['a'], [[o]]), table([o], [['a']]), *attribute):
            text = to_xml(got, indent=False)
            assert '<b ' not in text and '&lt;b onload=' in text, (o, text)


def test_a_comparison_that_fails_says_why_as_text():
    a, b = [made(i) for i in range(2)], [made(i, 1) for i in range(2)]
    for o in b: o.status, o.error, o.seconds = 'failed', '<script>window.pwned=1</script>', None
    for o in b: o.profile['fit'] = '<img src=x>'
    html = report(b, against=a, anyway=True).html
    assert '<script' not in html and '<img' not in html and 'nothing to compare' in html


def test_a_section_is_a_function_in_a_list(monkeypatch):
    from fastbench.page import sections
    from fastbench.page.html import h
    monkeypatch.setattr(sections, 'SECTIONS', sections.SECTIONS[:])
    monkeypatch.setattr('fastbench.page.report.SECTIONS', sections.SECTIONS)
    @sections.section('Seeds & such')
    def seeds(shown): return [h.p(f'{s.label}: <{s.run.seed}>') for s in shown.all]
    @sections.section('Nothing')
    def nothing(shown): return []
    html = report([made(0), made(1)]).html
    assert '<section id="seeds"><h2>Seeds &amp; such</h2><p>A1: &lt;42&gt;</p>' in html and 'href="#seeds"' in html and 'Nothing' not in html
    assert html.index('id="raw"') < html.index('id="seeds"')


@pytest.mark.parametrize('odd', [dict(ranks=[1]), dict(resumed=dict(x=1)), dict(recipe=dict(kind=[2], name='r')), dict(recipe=dict(kind='none', name=3)), dict(engine=dict(batch=[1]))])
def test_odd_fields_of_a_file_do_not_lose_the_page(odd): assert '</html>' in report([made(1), made(**odd)]).html


@pytest.mark.parametrize('other', [1, {}, *(dict(samples_per_second=o) for o in (None, 'x', [2], dict(x=1), 'NaN', True))])
def test_the_rate_of_all_is_missing_where_one_process_lacks_its_own(other):
    run = made(ranks=[dict(samples_per_second=5.), other])
    assert run.figures.rate is None and '</html>' in report(run).html


def test_the_three_tables_have_three_names():
    names = re.findall(r'download="([^"]+)"', report(made(), title='a very long title '*9).html)
    assert len(set(names)) == 3 and {o.rpartition('-')[2] for o in names} == {'runs.csv', 'epochs.csv', 'steps.csv'}


def test_no_value_of_a_step_among_the_fields():
    run = made()
    run.profile['waited'], run.profile['held'] = run.profile['steps'], run.profile['steps']
    assert not [k for k in fields(run) if k.startswith(('profile.waited', 'profile.held'))]


def test_wide_signs_are_formulas_too(): assert csv_text(['＝a'], [['＋1', '－b', ' ＠c', '-3']]) == "'＝a\n'＋1,'－b,' ＠c,-3\n".replace('\n', csv_text(['a'], [])[1:])


def test_the_median_of_two_lies_between_them():
    run = made(n=2, warm=0)
    got = details._told(Seen(run), 'train')
    a, b = steps_of(Seen(run).phases, 'train')['seconds']
    assert f'median {seconds((a + b)/2)}' in got, got


def epoch_line(**own):
    "The line of an epoch with fields of its own"
    run = made(epochs=1)
    run.epochs = [own]
    return next(csv.DictReader(io.StringIO(epochs_csv([Seen(run)]))))


def test_an_epochs_own_fields_do_not_replace_the_runs():
    line, plain = epoch_line(id='mine', label='best', seconds=7, epoch=9), epoch_line()
    assert line | plain == line and [line[f'epoch_{o}'] for o in ('id', 'label', 'seconds', 'epoch')] == ['mine', 'best', '7', '9']


@pytest.mark.parametrize('own', [dict(id='mine', epoch_id='other'), dict(epoch_id='other', id='mine')])
def test_none_of_an_epochs_own_fields_is_lost(own): assert {'mine', 'other'} < set(epoch_line(**own).values())


def test_the_picture_of_memory_says_what_is_drawn():
    assert re.search('Peak memory: [^"]*at least 763 MiB, device 28,610 MiB', report(gpu()).html)


@pytest.mark.parametrize('points', [2, 3, 7])
def test_never_more_points_than_asked(points):
    r = random.Random(0)
    xs = [r.random() for _ in range(50)]
    assert len(extremes(xs, points)[0]) <= points


@pytest.mark.parametrize('points', [0, 1])
def test_points_that_cannot_be(points):
    with pytest.raises(UserError, match=f'points={points} cannot be'): extremes([1., 2.], points)


def test_one_more_side_is():
    page = report([made(i, s, n=5, name=f'r{s}') for i in range(2) for s in range(8)]).html
    assert '1 more side is not compared here' in page


@pytest.mark.parametrize('damage', [lambda p: p.pop('fit'), lambda p: p.update(peaks=5), lambda p: p.update(peaks=[{}]), lambda p: p['steps']['train'].update(stride=0), lambda p: p['steps']['train'].update(stride='x')])
def test_a_damaged_profile_is_said_without_names_of_classes(damage):
    run = made()
    damage(run.profile)
    said = Seen(run).trouble
    assert said.startswith('its profile cannot be read: ') and 'Error' not in said and said.endswith('?') and '\n' not in said


def test_a_card_shows_what_its_own_function_has():
    "Parameters of another side's function are not of this one"
    runs = [made(0, 0), made(0, 1)]
    runs[0].recipe |= dict(width=3, norm=None)
    runs[1].recipe |= dict(depth=7, norm='batch')
    text = re.sub('<style>.*?</style>', '', report([[runs[0]], [runs[1]]]).html, flags=re.S)
    shown = re.findall(r'class="sub unlike">(.*?)</p>', text, re.S)
    assert shown == ['<bdi>width 3</bdi> · <bdi>norm none</bdi>', '<bdi>norm batch</bdi> · <bdi>depth 7</bdi>']
