"Reads what settings.ini holds: requirements, extras, the console script. The rest is in pyproject.toml."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(delimiters=['='], comment_prefixes=['#'])
config.read(here/'settings.ini', encoding='utf-8')
config = config['DEFAULT']


def lines(key): return [o.strip() for o in config.get(key, '').splitlines() if o.strip() and not o.strip().startswith('#')]


version = re.search(r'^__version__ = "(.+)"$', (here/'fastbench/__init__.py').read_text(encoding='utf-8'), re.M)[1]

setup(version=version, packages=find_packages(include=['fastbench', 'fastbench.*']),
      install_requires=lines('requirements'), extras_require={'dev': lines('dev_requirements')},
      entry_points={'console_scripts': lines('console_scripts'), 'nbdev': ['fastbench=fastbench._modidx:d']})
