"""What the site's search finds first. Zensical sorts by field, place of the word in it, and then as the entries come: so a name comes before longer ones that begin like it, and a class before its methods."""
import json
import re

NAME = re.compile(r'reference/[\w.-]+\.html#[\w.]+')
AHEAD = re.compile(r'^<p>source</p> |(?<=<code>)class ')  # what stands before the name in each entry of one


def entry(o):
    "The entry of a name, its text beginning with it"
    return o | dict(text=AHEAD.sub('', o['text']))


def is_name(o): return o['title'].startswith('<code>') and NAME.fullmatch(o['location'])


def ranked(items):
    "Names first, short ones before longer ones; functions behind commands only as the commands that they are"
    names = [entry(o) for o in items if is_name(o)]
    return sorted((o for o in names if not o['location'].startswith('reference/command.')), key=lambda o: len(o['title'])) + [o for o in items if not is_name(o)]


def rank(path):
    "Rewrite the `search.json` of a site"
    index = json.loads(path.read_text(encoding='utf-8'))
    index['items'] = ranked(index['items'])
    path.write_text(json.dumps(index, ensure_ascii=False, separators=(',', ':')), encoding='utf-8')
