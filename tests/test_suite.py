"What suites show beside the published figures: made up Runs, and the command where nothing can be trained."
import json

import pytest

from fastbench.compare.ladder import LadderTable
from fastbench.compare.precision import Precisions
from fastbench.errors import UserError
from fastbench.recipe import get_recipe, published, register_suite
from fastbench.recipe import _suites, _variants
from fastbench.runs.record import Run, plain
from fastbench.compare.suite import Suite, changed, plot_suite, suite, suite_rows, suite_table


def made_up(name, precision='fp16', took=100., data=None, recipe=(), **kwargs):
    r = plain(vars(get_recipe(name))) | dict(recipe)
    return Run(recipe=r, seconds=took, metrics=dict(accuracy=.9), precision=dict(effective=precision), device=dict(name='made up'), data=dict(name=data or r['data']), **kwargs)


def by(table): return {(r['recipe'], r['precision']): r for r in table.rows}


def test_every_published_figure_is_in_the_table_and_ours_beside_it():
    t = suite_table('colab', [made_up('imagenette-xresnet18', took=o) for o in (30., 10., 11.)])
    rows = by(t)
    assert isinstance(t, Suite) and rows['imagenette-xresnet18', 'fp16']['seconds'] == 11 and rows['imagenette-xresnet18', 'fp16']['n'] == 3 and 'medians' in str(t)
    for name in ('imagenette-xse_resnet50', 'imagenette-xresnet18', 'imagenette-xse_resnext50', 'imdb-roberta'):
        for o in published(name): assert rows[name, o['precision']]['published'][o['machine']] == o['seconds'] and f"{o['seconds']:g} s" in str(t)
    assert rows['imdb-roberta', 'fp32']['status'] == 'not run' and rows['imdb-roberta', 'fp32']['seconds'] is None
    assert 'neither run nor published: imagenette-timm_resnet50' in t.notes and 'NOT THE PUBLISHED' not in str(t)
    assert list(rows)[:2] == [('imagenette-xse_resnet50', 'fp16'), ('imagenette-xse_resnet50', 'fp32')]


def test_bf16_stands_beside_what_was_published_in_fp16():
    row = by(suite_table('colab', [made_up('imdb-roberta', 'bf16')]))['imdb-roberta', 'bf16']
    assert row['published']['SageMaker T4'] == 596.8


def test_other_work_is_named():
    runs = [made_up('imagenette-xresnet18', recipe=dict(epochs=1, bs=48, workers=0, batches=2)), made_up('imdb-roberta', data='reviews', recipe=dict(epochs=1))]
    assert changed(runs[0]) == dict(epochs=(1, 4), batches=(2, 'all')) and changed(runs[1]) == dict(epochs=(1, 4), data=('reviews', 'imdb'))
    note = next(o for o in suite_table('colab', runs).notes if o.startswith('NOT THE PUBLISHED WORK'))
    assert 'epochs 1 instead of 4;' in note and 'data reviews instead of imdb (imdb-roberta)' in note
    assert changed(made_up('dawn-baseline')) == {}, 'knots are tuples in a recipe and lists in a file'


def test_what_failed_or_was_refused_is_a_row():
    failed = made_up('imdb-roberta', took=None, status='failed', error='OutOfMemoryError: no more')
    t = suite_table('colab', [failed, made_up('imagenette-xresnet18', warnings=['busy machine: x'])], [(get_recipe(f'imagenette-{o}'), 'fp16 is slow on a CPU') for o in ('xse_resnext50', 'timm_resnet50')])
    assert by(t)['imdb-roberta', 'fp16']['status'] == 'failed' and by(t)['imagenette-xse_resnext50', 'fp16']['status'] == 'refused'
    text = str(t)
    assert 'imdb-roberta, fp16: failed (OutOfMemoryError: no more)' in text and 'imagenette-xse_resnext50, fp16: refused (fp16 is slow on a CPU)' in text and 'busy machine: x' in text
    assert 'imagenette-timm_resnet50, fp16: refused' in text and 'neither' not in text


def test_each_suite_has_its_own_table():
    assert isinstance(suite_table('dawn', [made_up('dawn-baseline')]), LadderTable)
    t = suite_table('wikitext', [made_up('wikitext2-lstm', 'fp32'), made_up('imdb-roberta')])
    assert isinstance(t, Precisions) and len(t.runs) == 1 and ' px' not in str(t) and 'weights were random' not in str(t)
    assert isinstance(suite_table('fp16', [made_up('cifar100-resnet18')]), Precisions)
    quick = suite_table('quick', [made_up('digits-xresnet18', 'fp32', recipe=dict(epochs=1))])
    assert isinstance(quick, Suite) and 'PUBLISHED' not in str(quick), 'nothing was published: nothing to differ from'
    with pytest.raises(UserError, match="suite 'colb'.*colab"): suite_rows('colb', [])


def test_shown_everywhere():
    import matplotlib
    matplotlib.use('agg')
    t = suite_table('colab', [made_up('imagenette-xresnet18'), made_up('imdb-roberta', 'fp32', 9.)])
    d = json.loads(t.to_json())
    assert d['rows'][0]['published']['SageMaker T4'] == 556.4 and len(d['runs']) == 2
    assert t.to_markdown().count('SageMaker T4') == 2 and 'SageMaker T4' in t._repr_html_() and 'published' in t.to_csv() and list(t.frame.columns)[:2] == ['recipe', 'precision']
    ax = t.plot()
    assert [o.get_text() for o in ax.get_yticklabels()][0] == 'imagenette-xse_resnet50 fp16' and len(ax.get_legend().get_texts()) == 5
    with pytest.raises(UserError, match='nothing to draw'): plot_suite(suite_table('colab', []))


def test_as_python(monkeypatch, tmp_path):
    import fastbench.bench.launch
    from fastbench.runs.store import save
    register_suite('mine', 'digits-xresnet18', 'photos-xresnet18')
    asked = []
    def launch(recipe, folder, tell, repeat, **kwargs):
        asked.append((recipe.name, repeat, recipe.epochs))
        if recipe.name.startswith('photos'): raise UserError('no photos here')
        return save(made_up(recipe.name, 'fp32', 5. + repeat, recipe=vars(recipe)), folder)
    monkeypatch.setattr(fastbench.bench.launch, 'launch', launch)
    try:
        t = suite('mine', tmp_path, repeats=2, epochs=2)
        assert sorted(asked) == [('digits-xresnet18', 0, 2), ('digits-xresnet18', 1, 2), ('photos-xresnet18', 0, 2)], 'what was refused is not tried again'
        assert by(t)['digits-xresnet18', 'fp32']['seconds'] == 5.5 and 'photos' in str(t)
        with pytest.raises(UserError, match="suite 'mien'"): suite('mien')
        monkeypatch.setattr(fastbench.bench.launch, 'launch', lambda *args, **kwargs: (_ for _ in ()).throw(UserError('not here')))
        with pytest.raises(UserError, match='nothing of suite mine could be run: not here'): suite('mine', tmp_path)
    finally:
        for d in (_suites, _variants): del d['mine']


@pytest.mark.parametrize('name, said', [('colab', r'imagenette-xresnet18 +fp16 +97.38 s'), ('quick', r'digits-xresnet18 +\S'), ('dawn', r'resnet9 +79 s'), ('fp16', r'cifar100-resnet18 +\S')])
def test_show_of_a_suite_is_what_was_published(name, said):
    import re
    from typer.testing import CliRunner
    from fastbench.cli import app
    got = CliRunner().invoke(app, ['show', name])
    assert got.exit_code == 0 and re.search(said, got.output), (got.output, got.exception)
    d = json.loads(CliRunner().invoke(app, ['show', name, '--json']).output)
    assert d['suite'] == name and len(d['recipes']) > 2 and d['rows'] == json.loads(json.dumps(d['rows']))
