"Links of a built site that lead nowhere: files and anchors, in pages and in their Markdown twins."
import re
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote, urlsplit

from lxml import html

REFS = dict(a='href', link='href', img='src', script='src', iframe='src', source='src')


class Read:
    "ids and references of a page"
    def __init__(self, text):
        tree = html.document_fromstring(text.encode(), parser=html.HTMLParser(encoding='utf-8'))
        self.ids = set(tree.xpath('//@id')) | set(tree.xpath('//a/@name'))
        self.refs = [(o.tag, url) for o in tree.iter(*REFS) if (url := o.get(REFS[o.tag])) is not None and o.get('rel') not in ('canonical', 'prev', 'next')]
        self.images = [(o.get('src'), o.get('alt')) for o in tree.iter('img')]


def read(site): return {p.relative_to(site).as_posix(): Read(p.read_text(encoding='utf-8')) for p in sorted(Path(site).rglob('*.html'))}


def split(url, page):
    "(file, anchor) that `url` names on `page`; None for another host, a script or data"
    u = urlsplit(url)
    if u.scheme or u.netloc: return None
    return normpath(join(dirname(page), unquote(u.path))).lstrip('/') if u.path else page, unquote(u.fragment)


def dead(site, pages=None):
    "'page: link' of every reference within `site` that leads nowhere; `pages` is what `read` gave, if it was read"
    site, pages, res = Path(site), read(site) if pages is None else pages, []
    for page, found in pages.items():
        if page == '404.html': continue  # its links are seen from the root of a host
        for tag, url in found.refs:
            to = split(url, page)
            if to is None: continue
            file, anchor = to
            if not (site/file).is_file() or anchor and file in pages and anchor not in pages[file].ids: res.append(f'{page}: {url}')
    for path in sorted(site.rglob('*.md')) + sorted(site.glob('llms.txt')):
        page = path.relative_to(site).as_posix()
        for url in re.findall(r'\]\(([^)\s]+)\)', without_code(path.read_text(encoding='utf-8'))):
            to = split(url, page)
            if to and not (site/to[0]).is_file(): res.append(f'{page}: {url}')
    return res


def without_code(text):
    text = re.sub(r'^(`{3,}).*?^\1`*$', '', text, flags=re.M | re.S)
    text = re.sub(r'^    .*$', '', text, flags=re.M)
    return re.sub(r'(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)', lambda m: '`x`', text, flags=re.S)
