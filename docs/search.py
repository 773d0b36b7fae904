"""What the site's search finds first, and that it finds it in pages opened as files.

Zensical sorts by field (title before text), by the place of the word in it, and then as the entries come. So what users need stands alone in its title, and
what is only for readers of the code comes with its module or page in front.
"""
import json
import re

NAME = re.compile(r'reference/([\w.-]+)\.html#[\w.]+')
AHEAD = re.compile(r'^<p>source</p> |(?<=<code>)class ')  # what stands before the name in each entry of one
PARTS = 'index', 'tutorials/', 'explanations/', 'reference/', ''


def is_name(o): return o['title'].startswith('<code>') and NAME.fullmatch(o['location'])


def named(o, users):
    "The entry of a name, its text beginning with it; `module.name` where it is none of `users` (name -> location), nor a method of one"
    owner, _, method = o['location'].split('#')[1].partition('.')
    ahead = '' if owner in users and (method or users[owner] == o['location']) else NAME.fullmatch(o['location'])[1] + '.'
    return o | dict(title=o['title'].replace('<code>', f'<code>{ahead}', 1), text=AHEAD.sub('', o['text']))


def placed(o, pages):
    "The entry of a section; one of the reference says of which page"
    page, _, anchor = o['location'].partition('#')
    alone = not anchor or not page.startswith('reference/') or '<code>' in o['title']
    return o if alone else o | dict(title=f"{pages[page]}: {o['title']}")


def ranked(items, users):
    "Names first, short ones before longer ones, then the pages that users read; functions behind commands only as the commands that they are"
    names, pages = [named(o, users) for o in items if is_name(o)], {o['location']: o['title'] for o in items if '#' not in o['location']}
    names = sorted((o for o in names if not o['location'].startswith('reference/command.')), key=lambda o: len(o['title']))
    rest = sorted((o for o in items if not is_name(o)), key=lambda o: next(i for i, p in enumerate(PARTS) if o['location'].startswith(p)))
    return names + [placed(o, pages) for o in rest]


def rank(site, users):
    "Rewrite `search.json`, and write `search.js` for pages opened as files: a browser starts no Worker from a file, but one from the text of it"
    index = json.loads((site/'search.json').read_text(encoding='utf-8'))
    index['items'] = ranked(index['items'], users)
    text = json.dumps(index, ensure_ascii=False, separators=(',', ':'))
    worker, = (o.read_text(encoding='utf-8') for o in (site/'assets'/'javascripts'/'workers').glob('search.*.js'))
    (site/'search.json').write_text(text, encoding='utf-8')
    (site/'search.js').write_text(f'var __index={text};\nWorker=class extends Worker{{constructor(){{super(URL.createObjectURL(new Blob([{json.dumps(worker)}])))}}}};\n', encoding='utf-8')
