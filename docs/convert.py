"""A notebook as Markdown: prose, code and the outputs it was saved with; exported cells become the names that they make.

`notebook` returns two texts, what Zensical renders and the page's Markdown twin. Nothing is run. A `Names` (names.py) says what a
backticked name, a notebook or a file of the repository is on the site, and how a public name is shown.
"""
import base64
import html
import re
from posixpath import dirname, normpath, relpath
from textwrap import indent

from fastcore.nbio import read_nb

FENCE = re.compile(r'^( *)(`{3,}|~{3,})')
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

def prose(text):
    "Split `text` into (is code, lines): what stands in fences is not to be touched"
    part, inside = [], None
    for line in text.split('\n'):
        m = FENCE.match(line)
        if inside is None and m:
            yield False, part
            part, inside = [line], m[2]
        else:
            part.append(line)
            if inside and m and m[2].startswith(inside) and not line.strip(' `~'):
                yield True, part
                part, inside = [], None
    yield inside is not None, part


def lists(lines):
    "An empty line before a list, without which Python-Markdown sees none, and four spaces where two were meant"
    out = []
    for line in lines:
        m = ITEM.match(line)
        if m and out and out[-1].strip() and not ITEM.match(out[-1]) and not out[-1].startswith(' '): out.append('')
        out.append('    '*(len(m[1])//2) + line.lstrip() if m and m[1] else line)
    return out


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

def linked(text, page, names, skip=None, twin=False):
    "`text` with links of notebooks as links of the site, and known names in backticks linked"
    def target(m): return m[1] + (names.place(m[2], page) or m[2]) + m[3]

    def named(m):
        before, after = m.string[:m.start()], m.string[m.end():m.end()+2]
        if before.count('[') > before.count(']') or after == '](': return m[0]
        to = names.resolve(m[2].replace('\\|', '|').strip(), page, skip)
        return f'[{m[0]}]({to})' if to else m[0]

    def one(line):
        if line.startswith('    ') and not ITEM.match(line): return line
        line = LINK.sub(target, line)
        return line if line.startswith('#') else CODE.sub(named, line)

    out = []
    for is_code, lines in prose(text): out += lines if is_code else map(one, lines if twin else lists(lines))
    return '\n'.join(out)


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
    if 'text/markdown' in data: return linked(data['text/markdown'].strip(), page, names, twin=twin)
    if 'text/html' in data and not twin: return embedded(data['text/html'], alt, page, pictures)
    return block(data.get('text/plain', ''))


def embedded(text, alt, page, pictures):
    "HTML of an output; a whole page in a frame becomes a file of its own"
    frame = re.match(r'\s*<iframe\s[^>]*?srcdoc="([^"]*)"', text)
    if frame:
        path = pictures.add(page, 'html', html.unescape(frame[1]).encode())
        title = html.escape(alt, quote=True)
        return f'<iframe class="page" loading="lazy" title="{title}" src="{path}"></iframe>\n\n[Open this page by itself]({path})'
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
    return written(cells, page, names, pictures[0], False), plain(written(cells, page, names, pictures[1], True))


def written(cells, page, names, pictures, twin):
    parts = []
    for cell in cells:
        if cell.cell_type == 'markdown': parts.append(linked(callouts(cell.source.strip(), twin), page, names, twin=twin))
        hidden = cell.has_directive('hide') or cell.has_directive('default_exp') or cell.directive('include') == 'false'
        if cell.cell_type != 'code' or hidden: continue
        text, lang = code_cell(cell.source)
        if cell.has_directive('export') or cell.has_directive('exporti'):
            found = names.of_cell(cell, page)
            parts += [names.shown(o, page, twin) for o in found]
            if not found and parts and parts[-1].split('\n')[-1].startswith('#'): parts.append(names.source_of(cell, page))  # nothing public under a heading
        elif cell.directive('echo') != 'false' and text: parts.append(fence(text, lang))
        if cell.directive('output') != 'false':
            parts += [output(o, said_of(cell, text), page, names, pictures, twin) for o in cell.outputs]
    return '\n\n'.join(filter(str.strip, parts)) + '\n'


def markdown_file(text, page, names, where, twin=False):
    "A Markdown file of the repository, its links seen from the site; `where` is the folder it lies in"
    def from_nbs(m): return m[0] if re.match(r'[a-z]+:|#', m[2]) else m[1] + '../' + normpath(f'{where}/{m[2]}') + m[3]
    return linked(LINK.sub(from_nbs, text), page, names, twin=twin)
