"""A notebook as Markdown: prose, code and the outputs it was saved with; exported cells become the names they make.

`notebook` returns two texts, what Zensical renders and the page's Markdown twin. Nothing is run. A `Names` (names.py)
says what a backticked name, a notebook or a file of the repository is on the site, and how a public name is shown.
"""
import base64
import html
import re
from posixpath import dirname, normpath, relpath
from textwrap import indent

from fastcore.nbio import read_nb

FENCED = re.compile(r'(^ *(`{3,}|~{3,}).*?(?:^ *\2[`~]* *$|\Z))', re.M | re.S)
CODE = re.compile(r'(?<![`\\])(`+)(?!`)(.+?)(?<!`)\1(?!`)')
ITEM = re.compile(r'^( *)([-*+]|\d+\.) ')
LINK = re.compile(r'(\]\()([^)\s]+)(\))')
CALLOUT = re.compile(r'^:{3,} *\{\.callout-(\w+)(?: title="([^"]+)")?\}\n(.*?)\n:{3,}$', re.M | re.S)
KINDS = dict(caution='warning', important='danger')  # what is no kind of Zensical
FRONT = re.compile(r'\A---\n.*?\n---\n+', re.S)


# Pieces of Markdown

def fence(text, lang=''):
    "`text` as a fenced block, the fence longer than any inside"
    marks = '`'*max(3, 1+max(map(len, re.findall('`+', text)), default=0))
    return f'{marks}{lang}\n{text.rstrip()}\n{marks}'


def block(text):
    "What was printed"
    text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', text).rstrip()
    return fence(text, '{.text .output}') if text else ''


def code(o): return f'`{o}`' if o not in ('', None) else ''


def cell(text): return re.sub(r'(?<!\\)\|', r'\\|', ' '.join(str(text).split()))


def table(head, *rows):
    "A Markdown table; nothing without rows, no column without a value"
    keep = [i for i in range(len(head)) if any(str(r[i]) for r in rows)]
    lines = [[o[i] for i in keep] for o in (head, ['---']*len(head), *rows)]
    return '\n'.join('| ' + ' | '.join(map(cell, o)) + ' |' for o in lines) if rows else ''


# For the site, for readers of Markdown

def outside_fences(change, text):
    "`text` with `change` made to what is not in a fence"
    parts = FENCED.split(text)
    parts[::3] = map(change, parts[::3])
    del parts[2::3]  # the marks
    return ''.join(parts)


def lists(text):
    "An empty line before a list, without which Python-Markdown sees none, and four spaces where two were meant"
    text = re.sub(r'^(?!\s|[-*+] |\d+\. )(.+)\n(?= *(?:[-*+]|\d+\.) )', r'\1\n\n', text, flags=re.M)
    return re.sub(r'^( +)(?=([-*+]|\d+\.) )', lambda m: '    '*(len(m[1])//2), text, flags=re.M)


def for_site(text):
    "As Python-Markdown wants it, which shows the backslash of a `a\\|b` in a table"
    def row(m): return re.sub('`[^`]+`', lambda m: m[0].replace('\\|', '|'), m[0])
    return re.sub(r'^\|.*', row, outside_fences(lists, text), flags=re.M)


def plain(text):
    "Without what only Zensical reads"
    text = FRONT.sub('', text)
    text = re.sub(r'^(`{3,})\{\.(\w+)[^}\n]*\}$', lambda m: m[1] + (m[2] if m[2] != 'text' else ''), text, flags=re.M)
    text = re.sub(r'^(#+ .*?) \{#[^}\n]*\}$', r'\1', text, flags=re.M)
    return re.sub(r'(?<=\))\{\.\w+\}|\n\{\.where\}|#__codelineno-0-\d+|<a id="[^"]*"></a>', '', text)


def callouts(text, twin):
    "Quarto's `:::{.callout-note}` as Zensical's `!!! note`, as a quotation in the twin"
    def shown(m):
        kind = KINDS.get(m[1], m[1])
        title = m[2] or kind.capitalize()
        if twin: return f'> **{title}**\n>\n' + indent(m[3], '> ', lambda _: True) + '\n'
        return f'!!! {kind} "{title}"\n\n' + indent(m[3], '    ') + '\n'
    return CALLOUT.sub(shown, text)


# Links, outputs, cells

def linked(text, page, names, skip=None):
    "`text` with links of notebooks as links of the site, and known names in backticks linked"
    def target(m): return m[1] + (names.place(m[2], page) or m[2]) + m[3]

    def named(m):
        before = m.string[:m.start()]
        if before.count('[') > before.count(']'): return m[0]  # in a link
        to = names.resolve(m[2].replace('\\|', '|').strip(), page, skip)
        return f'[{m[0]}]({to})' if to else m[0]

    def line(m):
        text = LINK.sub(target, m[0])
        return text if text.startswith('#') else CODE.sub(named, text)

    return outside_fences(lambda o: re.sub('.+', line, o), text)


class Pictures(dict):
    "path -> bytes of what lies beside the pages"
    def add(self, page, kind, data):
        stem = page.removesuffix('.md').replace('/', '-')
        n = 1 + sum(o.startswith(f'pictures/{stem}-') for o in self)
        path = f'pictures/{stem}-{n}.{kind}'
        self[path] = data
        return relpath(path, dirname(page) or '.')


def output(out, alt, page, names, pictures, twin):
    "A stored output as Markdown"
    if out.output_type == 'stream': return block(out.text) if out.name == 'stdout' else ''
    if out.output_type == 'error': return block(f"{out.ename}: {out.evalue}")
    data = out.data
    for mime, kind in (('image/png', 'png'), ('image/jpeg', 'jpg')):
        if mime in data: return f'![{alt}]({pictures.add(page, kind, base64.b64decode(data[mime]))})'
    if 'text/markdown' in data: return linked(data['text/markdown'].strip(), page, names)
    if 'text/html' in data and not twin: return embedded(data['text/html'], alt, page, pictures)
    return block(data.get('text/plain', ''))


def embedded(text, alt, page, pictures):
    "HTML of an output; a whole page in a frame becomes a file of its own"
    frame = re.match(r'\s*<iframe\s[^>]*?srcdoc="([^"]*)"', text)
    if frame:
        path = pictures.add(page, 'html', html.unescape(frame[1]).encode())
        page = f'<iframe class="page" loading="lazy" title="{html.escape(alt)}" src="{path}"></iframe>'
        return f'{page}\n\n[Open this page by itself]({path})'
    text = re.sub(r'<style[^>]*>.*?</style>', '', text, flags=re.S)
    text = text.replace(' style="text-align:left"', ' class="text"')
    text = re.sub(r'\s(?:border="\d+"|style="[^"]*")', '', text)
    text = re.sub(r'>\s*\n\s*', '>', text).replace('\n', '&#10;')
    return f'<div class="output html">{text}</div>'


def code_cell(source):
    "What is typed: shell lines as such, the rest as Python"
    lines = [o for o in source.splitlines() if not re.search(r'^\s*#\s*\||#\s*\|\s*hide_line\s*$', o)]
    text = '\n'.join(lines).strip('\n')
    if not text.startswith('!'): return text, 'python'
    return re.sub(r'^!|\s*2>/dev/null|\s*\|\s*cat$', '', text, flags=re.M), 'sh'


def said_of(cell, source):
    "What a picture shows: `#| fig-alt`, or what drew it"
    alt = cell.directive('fig-alt')
    if alt: return ' '.join(alt.split())
    last = source.rstrip(';').splitlines()[-1] if source else 'the code above'
    return f"What {last.strip()} draws".translate(str.maketrans('[]"', "()'"))


def default_exp(nb):
    "The module that a notebook writes, or None"
    return next(filter(None, (c.directive('default_exp') for c in nb.cells)), None)


def notebook(path, page, names, pictures):
    "Texts of the notebook at `path`: for the site, and the twin"
    cells = read_nb(path).cells
    site, twin = (written(cells, page, names, o, twin) for twin, o in enumerate(pictures))
    return for_site(site), plain(twin)


def written(cells, page, names, pictures, twin):
    parts = []
    for cell in cells:
        if cell.cell_type == 'markdown': parts.append(linked(callouts(cell.source.strip(), twin), page, names))
        hidden = cell.has_directive('hide') or cell.has_directive('default_exp') or cell.directive('include') == 'false'
        if cell.cell_type != 'code' or hidden: continue
        text, lang = code_cell(cell.source)
        if cell.has_directive('export') or cell.has_directive('exporti'):
            found = names.of_cell(cell, page)
            parts += [names.shown(o, page) for o in found]
            empty = parts and parts[-1].split('\n')[-1].startswith('#')  # a heading over nothing public
            if empty and not found: parts.append(names.source_of(cell, page))
        elif cell.directive('echo') != 'false' and text: parts.append(fence(text, lang))
        if cell.directive('output') != 'false':
            parts += [output(o, said_of(cell, text), page, names, pictures, twin) for o in cell.outputs]
    return '\n\n'.join(filter(str.strip, parts)) + '\n'


def markdown_file(text, page, names, where):
    "A Markdown file of the repository, its links seen from the site; `where` is the folder it lies in"
    def from_nbs(m):
        far = re.match('[a-z]+:|#', m[2])
        return m[0] if far else m[1] + '../' + normpath(f'{where}/{m[2]}') + m[3]
    return linked(LINK.sub(from_nbs, text), page, names)
