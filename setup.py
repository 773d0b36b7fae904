"Reads what settings.ini holds: requirements, extras, the console script. The rest is in pyproject.toml."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
config = ConfigParser(delimiters=['='], comment_prefixes=['#'])  # requirements hold ==, >= and ;
config.read_string((here/'settings.ini').read_text(encoding='utf-8'))


def lines(key): return [o for o in config['DEFAULT'][key].splitlines() if o.strip()]


version = re.search(r'^__version__ = "(.+)"$', (here/'fastbench/__init__.py').read_text(encoding='utf-8'), re.M)[1]

setup(version=version, packages=find_packages(include=['fastbench', 'fastbench.*']),
      install_requires=lines('requirements'), extras_require={o.removesuffix('_requirements'): lines(o) for o in config['DEFAULT'] if o.endswith('_requirements')},
      entry_points={'console_scripts': lines('console_scripts'), 'nbdev': ['fastbench=fastbench._modidx:d']})
