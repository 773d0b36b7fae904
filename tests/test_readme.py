"The generator of README.md, on notebooks made for it."
import base64
import importlib.util
import sys
from pathlib import Path

import pytest
from fastcore.nbio import mk_cell, new_nb, write_nb

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location('readme', ROOT/'docs'/'readme.py')
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)

PNG = base64.b64encode(b'a picture').decode()


def out(**data): return dict(output_type='display_data', metadata={}, data={k.replace('_', '/'): v for k, v in data.items()})


@pytest.fixture
def write(tmp_path):
    def _write(*cells):
        (tmp_path/'nbs').mkdir(exist_ok=True)
        made = []
        for src, outs in cells:
            made.append(mk_cell(src, 'markdown' if outs is None else 'code'))
            if outs is not None: made[-1]['outputs'] = outs
        write_nb(new_nb(made), tmp_path/'nbs'/'index.ipynb')
        return tmp_path
    return _write


def text(folder): return (folder/'README.md').read_text()


def test_readme_is_what_the_notebook_makes(): assert readme.main(check=True) == 0, 'run: python docs/readme.py'


def test_cells_and_outputs(write):
    folder = write(('# Title', None), ('#| hide\nsecret', []), ('#| export\nexported', []), ('#| default_exp x', []),
                   ('#| eval: false\n1+1', [out(text_plain='2')]), ('#| echo: false\nquiet()', [out(text_markdown='| a |\n|---|', text_plain='no')]),
                   ('say', [dict(output_type='stream', name='stdout', text='\x1b[1mbold\x1b[0m\n'), dict(output_type='stream', name='stderr', text='noise')]))
    assert readme.main(root=folder) == 0
    got = text(folder)
    assert got.startswith('<!-- ') and got.split('-->')[1] == (
        '\n\n# Title\n\n```python\n1+1\n```\n\n```\n2\n```\n\n| a |\n|---|\n\n```python\nsay\n```\n\n```\nbold\n```\n')


def test_pictures_are_files_and_old_ones_go(write):
    folder = write(('#| fig-alt: A bar\nplot()', [out(image_png=PNG, text_plain='<Axes>')]), ('again()', [out(image_png=PNG)]))
    readme.main(root=folder)
    assert '![A bar](docs/images/index-1.png)' in text(folder) and '<Axes>' not in text(folder)
    assert (folder/'docs/images/index-2.png').read_bytes() == b'a picture'
    readme.main(root=write(('plot()', [out(image_png=PNG)])))
    assert not (folder/'docs/images/index-2.png').exists()


def test_links_are_seen_from_the_folder_above(write):
    folder = write(('[a](02_recipe.ipynb) [b](../CONTRIBUTING.md) [c](https://example.org) [d](#start) ![e](../docs/images/x.png)', None))
    readme.main(root=folder)
    assert '[a](nbs/02_recipe.ipynb) [b](CONTRIBUTING.md) [c](https://example.org) [d](#start) ![e](docs/images/x.png)' in text(folder)


def test_a_fence_inside_an_output_does_not_end_it(write):
    readme.main(root=(folder := write(('x', [out(text_plain='```\ncode')]))))
    assert '````\n```\ncode\n````' in text(folder)


def test_check_names_what_differs_and_writes_nothing(write, capsys):
    folder = write(('plot()', [out(image_png=PNG)]))
    readme.main(root=folder)
    assert readme.main(check=True, root=folder) == 0
    (folder/'README.md').write_text('edited by hand')
    (folder/'docs/images/index-1.png').unlink()
    assert readme.main(check=True, root=folder) == 1
    assert 'README.md, docs/images/index-1.png' in capsys.readouterr().err and text(folder) == 'edited by hand'


def test_a_notebook_of_the_readme_runs_in_the_kernel_of_this_environment():
    "What Jupyter and VS Code start when `.venv` is chosen: the first lines of README, its table included"
    from jupyter_client.manager import start_new_kernel
    manager, client = start_new_kernel(kernel_name='python3', startup_timeout=600)
    said = []
    def heard(m): said.append(m['content'])
    code = "import sys; print(sys.prefix); from fastbench.all import *; learn = bench_learner('digits-xresnet18', batches=2, epochs=1, device='cpu').profile(); " \
           "exec('with learn.no_bar(), learn.no_logging(): learn.fit(1)'); learn.profiler.show(compact=True)"
    try: got = client.execute_interactive(code, timeout=600, output_hook=heard)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert got['content']['status'] == 'ok', got['content']
    assert any(sys.prefix in o.get('text', '') for o in said) and any('<table' in o.get('data', {}).get('text/html', '') for o in said)
