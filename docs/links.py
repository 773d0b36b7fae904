"Links of a built site that lead nowhere: files and anchors, in pages and in their Markdown twins."
import re
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote, urlsplit

from lxml import html

from convert import CODE, FENCED, LINK


class Read:
    "ids, references and images of a page"
    def __init__(self, text):
        tree = html.document_fromstring(text.encode(), parser=html.HTMLParser(encoding='utf-8'))
        self.ids = {*tree.xpath('//@id | //a/@name')}
        self.refs = tree.xpath('//@src | //@href[not(../@rel="canonical" or ../@rel="prev" or ../@rel="next")]')
        self.images = [(o.get('src'), o.get('alt')) for o in tree.iter('img')]


def texts(site, pattern):
    "Page -> what is in its file"
    return {o.relative_to(site).as_posix(): o.read_text(encoding='utf-8') for o in sorted(site.rglob(pattern))}


def read(site): return {page: Read(text) for page, text in texts(Path(site), '*.html').items()}


def written(text):
    "The links of a Markdown text"
    prose = re.sub('^    .*', '', ''.join(FENCED.split(text)[::3]), flags=re.M)
    return [m[2] for m in LINK.finditer(CODE.sub('', prose))]


def dead(site, pages=None):
    "'page: link' of every reference within `site` that leads nowhere; `pages` is what `read` gave, if it was read"
    site, pages = Path(site), pages or read(site)
    refs = {page: o.refs for page, o in pages.items() if page != '404.html'}  # a host shows it under any address
    refs |= {page: written(text) for page, text in (texts(site, '*.md') | texts(site, 'llms.txt')).items()}

    def leads(url, page):
        u = urlsplit(url)
        if u.scheme or u.netloc: return True
        to, anchor = normpath(join(dirname(page), unquote(u.path))).lstrip('/') if u.path else page, unquote(u.fragment)
        return (site/to).is_file() and (not anchor or to not in pages or anchor in pages[to].ids)
    return [f'{page}: {url}' for page, urls in refs.items() for url in urls if not leads(url, page)]
