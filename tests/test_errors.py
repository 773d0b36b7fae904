"What a notebook shows of a UserError: the user's own lines and the sentence"
import subprocess
import sys

import pytest

CELLS = """
from traitlets.config import Config
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(config=Config(HistoryManager=dict(enabled=False), InteractiveShell=dict(colors='nocolor')))
for cell in (
    "from helpers import recipe_of\\nrecipe_of('digits-resnet18')",
    "from fastbench.errors import UserError\\ntry: open('/not there')\\nexcept OSError as e: raise UserError('a sentence') from e",
    "%xmode Verbose",
    "recipe_of('digits-resnet18')",
    "1/0",
):
    print('CELL')
    shell.run_cell(cell)
"""


@pytest.fixture(scope='module')
def shown(tmp_path_factory):
    "What is shown of each cell"
    folder = tmp_path_factory.mktemp('notebook')
    (folder/'helpers.py').write_text('from fastcore.foundation import L\nfrom fastbench.recipe import get_recipe\n\ndef recipe_of(name): return L(name).map(get_recipe)[0]\n')
    done = subprocess.run([sys.executable, '-c', CELLS], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    return done.stdout.split('CELL\n')[1:]


def test_the_users_own_lines_alone(shown):
    assert "recipe_of('digits-resnet18')" in shown[0] and 'def recipe_of(name)' in shown[0]
    assert not any(o in shown[0] for o in ('site-packages', 'def map', 'fastbench/recipe.py'))
    assert shown[0].rstrip().splitlines()[-1].startswith("UserError: unknown recipe 'digits-resnet18'; did you mean 'digits-xresnet18'?")


def test_its_cause_is_shown(shown): assert 'FileNotFoundError' in shown[1] and shown[1].rstrip().endswith('UserError: a sentence')


def test_all_lines_on_request(shown): assert 'def map' in shown[3] and '_no_recipe' in shown[3]


def test_other_errors_are_as_they_were(shown): assert 'ZeroDivisionError' in shown[4]
