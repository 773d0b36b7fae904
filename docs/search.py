"""What the site's search finds first, and that it finds it in pages opened as files.

Zensical sorts by field (title before text), by the place of the word in it, and then as the entries come. So what users
need stands alone in its title, and what is only for readers of the code comes with its module or page in front.
"""
import json
import re

NAME = re.compile(r'reference/([\w.-]+)\.html#[\w.]+')
AHEAD = re.compile(r'^<p>source</p> |(?<=<code>)class ')  # what stands before the name in each entry of one
PARTS = 'index', 'tutorials/', 'explanations/', 'reference/', ''
# A browser starts no Worker from a file, but one from the text of it
WORKER = """var __index={};
Worker=class extends Worker{{constructor(){{super(URL.createObjectURL(new Blob([{}])))}}}};
"""


def is_name(o): return o['title'].startswith('<code>') and NAME.fullmatch(o['location'])


def named(o, users):
    "The entry of a name, its text beginning with it; `module.name` where it is none of `users` (name -> location)"
    owner, _, method = o['location'].split('#')[1].partition('.')
    users_own = owner in users and (method or users[owner] == o['location'])
    ahead = '' if users_own else NAME.fullmatch(o['location'])[1] + '.'
    return o | dict(title=o['title'].replace('<code>', f'<code>{ahead}', 1), text=AHEAD.sub('', o['text']))


def placed(o, titles):
    "The entry of a section; one of the reference says of which page"
    page, _, anchor = o['location'].partition('#')
    alone = not anchor or not page.startswith('reference/') or '<code>' in o['title']
    return o if alone else o | dict(title=f"{titles[page]}: {o['title']}")


def ranked(items, users):
    "Names first, short ones before longer ones, then the pages that users read; no functions behind commands"
    titles = {o['location']: o['title'] for o in items}
    names = [named(o, users) for o in items if is_name(o) and not o['location'].startswith('reference/command.')]
    rest = [placed(o, titles) for o in items if not is_name(o)]
    def part(o): return next(i for i, p in enumerate(PARTS) if o['location'].startswith(p))
    return sorted(names, key=lambda o: len(o['title'])) + sorted(rest, key=part)


def rank(site, users):
    "Rewrite `search.json`, and write `search.js` for pages opened as files"
    index = json.loads((site/'search.json').read_text(encoding='utf-8'))
    index['items'] = ranked(index['items'], users)
    text = json.dumps(index, ensure_ascii=False, separators=(',', ':'))
    worker, = (o.read_text(encoding='utf-8') for o in (site/'assets'/'javascripts'/'workers').glob('search.*.js'))
    (site/'search.json').write_text(text, encoding='utf-8')
    (site/'search.js').write_text(WORKER.format(text, json.dumps(worker)), encoding='utf-8')
