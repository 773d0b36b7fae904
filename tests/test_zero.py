"Two processes, and four, train with each stage of ZeRO (gloo, CPU): equal to one process, files and predictions whole, decided together, the rest refused in a line"
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastbench.bench import processes
from fastbench.errors import UserError
from fastbench.recipe import get_recipe
from fastbench.runs.store import load
from started import kept_port, outcome
from test_resume_ranks import apart

HERE = Path(__file__).parent
STAGES = 'zero1', 'zero2', 'zero3', 'zero2-offload', 'zero3-offload'
ROUNDING = dict(bf16=1e-3) # shares are summed in fp32, and each is rounded to 8 bits


def test_without_deepspeed_it_is_one_line(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None if name == 'deepspeed' else name)
    with pytest.raises(UserError, match=r"'zero2' is DeepSpeed's, which is not there: pip install 'fastbench\[deepspeed\]'"): processes.Starter(2, 'zero2')
    with pytest.raises(UserError, match='did you mean'): processes.Starter(2, 'zero22')


@pytest.fixture(scope='module')
def started(tmp_path_factory):
    "What both processes wrote down"
    pytest.importorskip('deepspeed', reason="pip install 'fastbench[deepspeed]'")
    folder = tmp_path_factory.mktemp('zero')
    env = {k: v for k, v in os.environ.items() if k not in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK')} | dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]))
    with kept_port() as port: code, said = outcome(HERE/'zero_ranks.py', folder, port, env=env)
    assert not code, said[-6000:]
    return folder


@pytest.fixture(scope='module')
def two(started): return [json.loads((started/'two'/f'{i}.json').read_text()) for i in range(2)]


@pytest.fixture(scope='module')
def four(started): return [json.loads((started/'four'/f'{i}.json').read_text()) for i in range(4)]


@pytest.mark.parametrize('stage', STAGES)
def test_weights_are_those_of_one_process(two, stage):
    "Shares of 12 and 4 samples, a schedule of lr and momentum, clipping, accumulation, groups, frozen weights"
    for r in two:
        found = r[stage]['equal']
        assert len(found) == (4 if 'offload' in stage else 15 if stage == 'zero3' else 16)
        assert not {k: o['apart'] for k, o in found.items() if not o['apart'] < ROUNDING.get(k, 1e-6)}
        for k, o in found.items(): assert o['loss'] == pytest.approx(o['want'], rel=1e-2 if k == 'bf16' else 1e-5)


@pytest.mark.parametrize('stage', ['zero1', 'zero2', 'zero3'])
def test_four_processes_too(four, stage):
    "Shares of 7, 1, 5 and 3 samples"
    for r in four:
        found = r[stage]['equal']
        assert set(found) == {'torch_adamw', 'both', 'adam', 'sgd'} and all(o['apart'] < 1e-6 for o in found.values()), {k: o['apart'] for k, o in found.items()}
        assert r[stage]['goes_on'] and max(r[stage]['goes_on'].values()) < 1e-6


@pytest.mark.parametrize('stage', ['zero1', 'zero2', 'zero3'])
def test_what_is_to_be_computed_in_bf16_is(two, stage):
    for r in two:
        o = r[stage]['equal']['bf16']
        assert o['computed'] == ['torch.bfloat16'] and o['engine']['precision'] == 'bf16'


@pytest.mark.parametrize('stage', STAGES)
def test_afterwards_the_model_is_as_it_was(two, stage):
    for r in two:
        for k, o in r[stage]['equal'].items():
            assert o['same'] and o['kinds'] == ['Parameter'] and o['left'] == [], k
            assert o['opt'] == ('OptimWrapper' if k in ('torch_adamw', 'torch_sgd', 'both', 'tokens') else 'TorchOptimizer' if k == 'fused' else 'Optimizer')


@pytest.mark.parametrize('stage', STAGES)
def test_one_process_goes_on_with_the_same_optimizer(two, stage):
    for r in two: assert not {k: v for k, v in r[stage]['goes_on'].items() if not v < ROUNDING.get(k, 1e-6)}


@pytest.mark.parametrize('stage', ['zero2', 'zero3'])
def test_the_state_goes_into_a_block_and_out_of_it(two, stage):
    for r in two: assert max(r[stage]['back'].values()) < 1e-6


@pytest.mark.parametrize('stage', STAGES)
def test_the_engine_is_what_was_asked_for(two, stage):
    for r in two:
        o = r[stage]['equal']['both']['engine']
        assert o == dict(strategy=stage, world_size=2, backend='gloo', sharded='3' in stage, zero_stage=int(stage[4]), device='cpu', precision='fp32', clip=.02, accumulate=32)


@pytest.mark.parametrize('n,stage', [*((2, o) for o in STAGES), *((4, o) for o in STAGES[:3])])
def test_memory_is_as_foretold(two, four, n, stage):
    "But for padding, at most 16 numbers a group in two vectors"
    ranks = two if n == 2 else four
    for name in ('torch_adamw', 'adam'):
        for k in ('weights', 'gradients', 'optimizer'):
            held, foretold = max(r[stage]['equal'][name]['held'][k] for r in ranks), ranks[0][stage]['equal'][name]['foretold'][k]
            assert held == pytest.approx(foretold, rel=.01, abs=3*16*4/1e6), (name, k)


@pytest.mark.parametrize('stage', ['zero2', 'zero3'])
def test_processes_decide_together(two, stage):
    a, b = (r[stage]['decided'] for r in two)
    for how in ('nan', 'stop', 'term', 'ctrl_c'): assert a[how]['steps'] == b[how]['steps'] == (3 if how == 'stop' else 4) and a[how]['whole'] == b[how]['whole'] == 256
    assert a['early'] == b['early'] == [2, 3, 4, 5, 1, 2] and a['goal'] == b['goal'] == 1 and a['lr_find'] == b['lr_find'] == two[0]['zero2']['decided']['lr_find']


@pytest.mark.parametrize('stage', ['zero2', 'zero3'])
def test_a_file_of_several_is_one_of_one_process(two, started, stage):
    import torch
    from fastai.optimizer import Adam
    from processes import F1Score, Net, accuracy, learner, plain
    saved = torch.load(started/'two'/'models'/f'whole-{stage}.pth', weights_only=False)
    assert [o['grad_avg'].shape for o in saved['opt']['state']] == [p.shape for p in Net().parameters()] and {type(o) for o in saved['model'].values()} == {torch.Tensor}
    learn = learner(Adam, data=plain(), metrics=[accuracy, F1Score(average='macro')])
    learn.path = started/'two'
    learn.load(f'whole-{stage}', weights_only=False)
    with learn.no_bar(), learn.no_logging(): want, preds = learn.validate(), learn.get_preds()[0]
    for r in two:
        got = r[stage]['files']
        assert got['valid'] == pytest.approx([float(o) for o in want], rel=1e-5) and torch.allclose(torch.tensor(got['preds']), preds, atol=1e-6)
        assert 'no luck' in got['fails']


REFUSED = dict(ranger='cannot step Lookahead', rmsprop='cannot step RMSprop', made='is made already', Compile='remove_cb(Compile)', EMACallback='remove_cb(EMACallback)', HalfPrecision='remove_cb(HalfPrecision)', ChannelsLast='remove_cb(ChannelsLast)', fastais='in bf16 after learn.bench().to_bf16()', fp16='in bf16 after learn.bench().to_bf16()', later='remove_cb(Compile)',
               norm='one GradientClip with norm_type=2', cancelled='cancel the batch instead', reset='before the block', freeze='freeze or unfreeze before the block', beside='is not in effect', gan="strategy='ddp'", dropped="strategy='zero2' or 'fsdp'", clips='clipping is 1.0, not 0.0')


@pytest.mark.parametrize('what', REFUSED)
def test_what_was_not_tried_or_is_not_in_effect_is_refused(two, what):
    for r in two: assert r['refused'][what].startswith('UserError') and REFUSED[what] in r['refused'][what]
    assert set(two[0]['refused']) == set(REFUSED)


@pytest.mark.usefixtures('bf16')
@pytest.mark.parametrize('rung,changes', [('faster-docstrings-zero2', dict(sample=.03, max_length=32)), ('scale-zero2', dict(sample=.06))])
def test_the_rungs_of_published_ladders(tmp_path, rung, changes):
    "As meant, two processes of this machine; or two in place of four machines"
    pytest.importorskip('deepspeed', reason="pip install 'fastbench[deepspeed]'")
    start = processes.Starter() if rung.startswith('faster') else processes.Starter(2, 'zero2')
    run = load(start(get_recipe(rung, epochs=1, **changes), folder=tmp_path, device='cpu', offline=True))
    assert run.status == 'ok' and run.processes == (2, 'zero2') and run.engine['zero_stage'] == 2 and run.precision['effective'] == 'bf16', run.error


@pytest.fixture(scope='module')
def resumed(tmp_path_factory):
    "What trainings saw that were killed, and went on"
    pytest.importorskip('deepspeed', reason="pip install 'fastbench[deepspeed]'")
    folder = tmp_path_factory.mktemp('zero-resume')
    env = {k: v for k, v in os.environ.items() if k not in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK')} | dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]))
    code, said = outcome(HERE/'zero_resume.py', folder, env=env)
    assert not code and (folder/'result.json').exists(), said[-6000:]
    return json.loads((folder/'result.json').read_text())


@pytest.mark.parametrize('case,at', [('zero3', 8), ('collected', 6)])
def test_a_killed_process_and_the_same_number_again(case, at, resumed):
    "Each with its own buffers; one is due after step 8, in the midst of three batches that are collected, so the one after step 6 is the last"
    got = resumed[case]
    assert got['killed'][1] == -9 and 'error' in got['killed'][0] and got['header']['tied'] == {'b.weight': 'a.weight'}
    for whole, same in zip(got['whole'], got['same'], strict=True):
        assert same.get('resumed') == [at] and len(whole['losses']) == 15, same
        assert apart(whole, same) < 1e-6


@pytest.mark.parametrize('there,n', [('on_1', 1), ('as_fsdp', 2)])
def test_other_processes_and_strategies_go_on(there, n, resumed):
    got = resumed['zero3']
    assert len(got[there]) == n and all(o.get('resumed') == [8] and o['digests']['8'] == got['whole'][0]['digests']['8'] for o in got[there])  # weights and optimizer to the last bit
    assert got['exported'] == dict(weights=got['same'][0]['weights'], tied=True)


def test_the_command_keeps_a_run(tmp_path):
    pytest.importorskip('deepspeed', reason="pip install 'fastbench[deepspeed]'")
    words = ['launch', str(tmp_path/'mine.py:make'), '--nproc', '2', '--strategy', 'zero2', '--device', 'cpu', '--out', str(tmp_path), '--json']
    (tmp_path/'mine.py').write_text('''
from fastai.vision.all import *
from fastbench.all import *
def make():
    set_seed(1)
    data = [(torch.randn(5), i%3) for i in range(64)]
    dls = DataLoaders(*(DataLoader(data, bs=8, num_workers=0) for _ in range(2)), device='cpu')
    return BenchLearner(dls, nn.Linear(5, 3), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
''')
    got = subprocess.run([sys.executable, '-m', 'fastbench', *words], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert not got.returncode, got.stderr[-3000:]
    run, = json.loads(got.stdout)
    assert (run['status'], run['world_size'], run['strategy'], run['engine']['zero_stage']) == ('ok', 2, 'zero2', 2)
