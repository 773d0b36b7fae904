"""A notebook as Markdown: prose, code and the outputs it was saved with; exported cells become the names that they make.

`notebook` returns two texts, what Zensical renders and the page's Markdown twin. Nothing is run. A `Names` (names.py) says what a
backticked name, a notebook or a file of the repository is on the site, and how a public name is shown.
"""
import base64
import html
import re
from posixpath import dirname, normpath, relpath

from fastcore.nbio import read_nb

ANSI = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]')
FENCE = re.compile(r'^( *)(`{3,}|~{3,})')
CODE = re.compile(r'(?<![`\\])(`+)(?!`)(.+?)(?<!`)\1(?!`)')
NOT_SHOWN = 'hide default_exp'.split()
KINDS = dict(note='note', tip='tip', warning='warning', caution='warning', important='danger')


def fence(text, lang=''):
    "`text` as a fenced block, the fence longer than any inside"
    marks = '`'*max(3, 1+max(map(len, re.findall('`+', text)), default=0))
    return f'{marks}{lang}\n{text.rstrip()}\n{marks}'


def prose(text):
    "Split `text` into (is code, lines): what stands in fences is not to be touched"
    part, inside = [], None
    for line in text.split('\n'):
        m = FENCE.match(line)
        if inside is None and m:
            if part: yield False, part
            part, inside = [line], m[2]
        elif inside is not None:
            part.append(line)
            if m and m[2].startswith(inside) and not line.strip(' `~'):
                yield True, part
                part, inside = [], None
        else: part.append(line)
    if part: yield inside is not None, part


def callouts(text, twin):
    "Quarto's `:::{.callout-note}` as Zensical's `!!! note`, as a quotation in the twin; other `:::` go"
    out, kind = [], None
    for line in text.split('\n'):
        opened = re.match(r'\s*:{3,}\s*\{?\.?(?:callout-(\w+))?([^}]*)\}?\s*$', line)
        if not opened or not line.strip().startswith(':::'):
            out.append(line if kind is None else ('> ' if twin else '    ') + line if line.strip() or twin else '')
        elif opened[1]:
            kind, title = KINDS.get(opened[1], 'note'), re.search(r'title="([^"]+)"', opened[2] or '')
            said = title[1] if title else kind.capitalize()
            out += ['', f'> **{said}**', '>'] if twin else ['', f'!!! {kind} "{said}"', '']
        else:
            if kind: out.append('')
            kind = None
    return '\n'.join(out)


def lists(lines):
    "An empty line before a list, without which Python-Markdown sees none, and four spaces where two were meant"
    item, out = re.compile(r'^( *)([-*+]|\d+\.) '), []
    for line in lines:
        m = item.match(line)
        if m and out and out[-1].strip() and not item.match(out[-1]) and not out[-1].startswith(' '): out.append('')
        out.append('    '*(len(m[1])//2) + line.lstrip() if m and m[1] else line)
    return out


def linked(text, page, names, skip=None, twin=False):
    "`text` with links of notebooks as links of the site, and known names in backticks linked"
    def target(m):
        to = names.place(m[2], page)
        return f'{m[1]}{to or m[2]}{m[3]}'

    def code(m):
        before, after = m.string[:m.start()], m.string[m.end():m.end()+2]
        if before.count('[') > before.count(']') or after.startswith(']('): return m[0]
        to = names.resolve(m[2].replace('\\|', '|').strip(), page, skip)
        return f'[{m[0]}]({to})' if to else m[0]

    out = []
    for is_code, lines in prose(text):
        if is_code:
            out += lines
            continue
        for line in lists(lines) if not twin else lines:
            if line.startswith('    ') and not re.match(r' +([-*+]|\d+\.) ', line):
                out.append(line)
                continue
            line = re.sub(r'(\]\()([^)\s]+)(\))', target, line)
            out.append(line if line.startswith('#') else CODE.sub(code, line))
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
    data = {k: ''.join(v) if isinstance(v, list) else v for k, v in out.get('data', {}).items()}
    if out.output_type == 'stream': return block(''.join(out.text), twin) if out.name == 'stdout' else ''
    if out.output_type == 'error': return block(f"{out.ename}: {out.evalue}", twin)
    for mime, kind in (('image/png', 'png'), ('image/jpeg', 'jpg')):
        if mime in data: return f'![{alt}]({pictures[twin].add(page, kind, base64.b64decode(data[mime]))})'
    if 'text/markdown' in data: return linked(data['text/markdown'].strip(), page, names, twin=twin)
    if 'text/html' in data and not twin: return embedded(data['text/html'], alt, page, pictures[twin])
    return block(data['text/plain'], twin) if 'text/plain' in data else ''


def block(text, twin):
    "A printed text"
    text = ANSI.sub('', text).rstrip()
    return fence(text, '' if twin else '{.text .output}') if text else ''


def embedded(text, alt, page, pictures):
    "HTML of an output; a whole page in a frame becomes a file of its own"
    frame = re.match(r'\s*<iframe\s[^>]*?srcdoc="([^"]*)"', text)
    if frame:
        path = pictures.add(page, 'html', html.unescape(frame[1]).encode())
        return f'<iframe class="page" loading="lazy" title="{html.escape(alt, quote=True)}" src="{path}"></iframe>\n\n[Open this page by itself]({path})'
    text = re.sub(r'<style[^>]*>.*?</style>', '', text, flags=re.S)
    text = text.replace(' style="text-align:left"', ' class="text"')
    text = re.sub(r'\s(?:border="\d+"|style="[^"]*")', '', text)
    text = re.sub(r'>\s*\n\s*', '>', text).replace('\n', '&#10;')
    return f'<div class="output html">{text}</div>'


def shown(cell):
    "Whether source and outputs of a code cell are to be seen"
    off = 'false', 'none'
    if any(cell.has_directive(o) for o in NOT_SHOWN) or str(cell.directive('include', 'true')).lower() in off: return False, False
    source = str(cell.directive('echo', 'true')).lower() not in off and not cell.has_directive('hide_input')
    return source, str(cell.directive('output', 'true')).lower() not in off and not cell.has_directive('hide_output')


def code_cell(source):
    "What is typed: shell lines as such, the rest as Python"
    lines = [o for o in source.splitlines() if not re.match(r'\s*#\s*\|', o) and not re.search(r'#\s*\|\s*hide_line\s*$', o)]
    text = '\n'.join(lines).strip('\n')
    if text and all(o.startswith('!') for o in text.splitlines()):
        return '\n'.join(re.sub(r'\s*2>/dev/null|\s*\|\s*cat$', '', o[1:]) for o in text.splitlines()), 'sh'
    return text, 'python'


def said_of(cell, source):
    "What a picture shows: `#| fig-alt`, or what drew it"
    alt = cell.directive('fig-alt')
    if alt: return ' '.join(alt.split()) if isinstance(alt, str) else ' '.join(alt)
    last = source.rstrip(';').splitlines()[-1] if source else 'the code above'
    return f"What {last.strip()} draws".translate(str.maketrans('[]"', "()'"))


def notebook(path, page, names, pictures):
    "Texts of the notebook at `path`: for the site, and the twin"
    nb, parts = read_nb(path), ([], [])
    for cell in nb.cells:
        for twin in (False, True):
            add = parts[twin].append
            if cell.cell_type == 'markdown':
                if not cell.source.strip().startswith(('---\n', '<!-- WARNING')): add(linked(callouts(cell.source.strip(), twin), page, names, twin=twin))
            if cell.cell_type != 'code': continue
            exported = cell.has_directive('export') or cell.has_directive('exporti') or cell.has_directive('exports')
            if exported and not cell.has_directive('hide'):
                found = names.of_cell(path, cell)
                for o in found: add(names.shown(o, page, twin))
                if not found and parts[twin] and parts[twin][-1].split('\n')[-1].startswith('#'): add(names.source_of(path, cell, page, twin))  # a heading over nothing public
            source, outputs = shown(cell)
            text, lang = code_cell(cell.source)
            if source and text and (not exported or cell.has_directive('exports')) and 'nbdev_export()' not in text:
                add(fence(text, lang))
            if outputs: parts[twin].extend(output(o, said_of(cell, text), page, names, pictures, twin) for o in cell.outputs)
    return tuple('\n\n'.join(o for o in p if o.strip()) + '\n' for p in parts)


def markdown_file(text, page, names, where, twin=False):
    "A Markdown file of the repository, its links seen from the site; `where` is the folder it lies in"
    def from_nbs(m): return m[0] if re.match(r'[a-z]+:|#', m[2]) else m[1] + '../' + normpath(f'{where}/{m[2]}') + m[3]
    text = re.sub(r'(\]\()([^)\s]+)(\))', from_nbs, text)
    return linked(text, page, names, twin=twin)
