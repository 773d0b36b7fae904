"Two processes told as torchrun tells them, and four in a group that somebody else made (gloo, CPU): equal to one process, decided together, files and predictions whole, memory as predicted"
import ast
import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip('accelerate')
from fastai.data.load import DataLoader
from fastai.optimizer import Adam

import processes
from fastbench.errors import UserError
from fastbench.machine import group
from fastbench.measure.loader import fastai_batches
from started import done_by_all

ROOT, STRATEGIES = Path(__file__).resolve().parent.parent, ('ddp', 'fsdp')


@pytest.fixture(scope='module')
def started(tmp_path_factory):
    "The folder in which each process wrote down what it saw"
    return done_by_all('processes.py', tmp_path_factory.mktemp('processes'), processes.NAMES)


def written(folder, n): return [json.loads((folder/f'{i}.json').read_text()) for i in range(n)]


@pytest.fixture(scope='module')
def folder(started): return started/'two'


@pytest.fixture(scope='module')
def two(folder): return written(folder, 2)


@pytest.fixture(scope='module')
def four(started): return written(started/'four', 4)


def both(two, four, strategy, name): return [r[strategy]['equal'][name] for r in (two if name not in processes.FEW else two + four)]


CASES = [(s, c) for s in STRATEGIES for c in processes.CASES if (s, c) not in processes.REFUSED]
HALF = 1e-3  # gradients of 8 bits, of shares and of all samples


@pytest.mark.parametrize('strategy,name', CASES)
def test_weights_are_those_of_one_process(two, four, strategy, name):
    "Shares of 12 and 4, of 7, 1, 5 and 3 samples; each process began with other weights"
    for o in both(two, four, strategy, name): assert o['apart'] < (HALF if name == 'half' else 1e-6) and o['same'], o['apart']


@pytest.mark.parametrize('strategy,name', CASES)
def test_the_training_loss_is_that_of_all_samples(two, four, strategy, name):
    for o in both(two, four, strategy, name): assert o['loss'] == pytest.approx(o['want'], rel=HALF if name == 'half' else 1e-5)


@pytest.mark.parametrize('strategy,name', [o for o in CASES if o[1] != 'sum'])  # the mean of sums depends on how it is cut
def test_the_recorder_writes_what_one_process_writes(two, four, strategy, name):
    for o in both(two, four, strategy, name): assert o['values'] == pytest.approx(o['want_values'], rel=HALF if name == 'half' else 1e-5)


@pytest.mark.parametrize('strategy,name', CASES)
def test_afterwards_one_process_goes_on_with_the_same_optimizer(two, four, strategy, name):
    for r in two if name not in processes.FEW else two + four: assert r[strategy]['goes_on'][name] < (HALF if name == 'half' else 1e-6)


def test_half_precision_computes_in_16_bits_and_steps_in_32(two):
    for r in two: assert r['fsdp']['equal']['half']['computed'] == [['torch.bfloat16 torch.bfloat16'], 'torch.float32'] and r['fsdp']['equal']['half']['engine']['precision'] == 'half-bf16'


@pytest.mark.parametrize('name', ['sgd', 'torch_adamw', 'fused_adamw', 'accumulate', 'clip'])
def test_gradients_lie_where_ddp_sends_them_from(two, name):
    assert [r['ddp']['equal'][name]['in_buckets'] for r in two] == [True, True]


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_the_engine_is_what_was_asked_for(two, four, strategy):
    for n, ranks in ((2, two), (4, four)):
        for r in ranks:
            o = r[strategy]['equal']['both']
            assert o['engine'] == dict(strategy=strategy, world_size=n, backend='gloo', sharded=strategy == 'fsdp', zero_stage=None, device='cpu', precision='fp32', clip=.02, accumulate=32)
            assert o['parts'] == ['DTensor' if strategy == 'fsdp' else 'Parameter']
        assert [len(r[strategy]['equal']['both']['tell']) for r in ranks] == [1] + [0]*(n - 1)
        assert f'{n} x 16 = {n*16} samples. The learning rate is used as you give it' in ranks[0][strategy]['equal']['both']['tell'][0]


@pytest.mark.parametrize('strategy,name', [(s, c) for s in STRATEGIES for c in ('sgd', 'torch_adamw')])
def test_memory_is_as_predicted(two, four, strategy, name):
    for ranks in (two, four):
        held = [r[strategy]['equal'][name]['held'] for r in ranks]
        for k in ('weights', 'gradients', 'optimizer'):
            assert max(o[k] for o in held) == pytest.approx(ranks[0][strategy]['equal'][name]['told'][k], rel=1e-6), k
        whole = 256*4/1e6
        assert sum(o['weights'] for o in held) == pytest.approx(whole if strategy == 'fsdp' else whole*len(ranks))


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('how', ['nan', 'stop', 'term', 'ctrl_c'])
def test_what_one_process_decides_all_do_at_the_same_step(two, strategy, how):
    a, b = (r[strategy]['decided'][how] for r in two)
    assert a['steps'] == b['steps'] == (3 if how == 'stop' else 4)
    assert a['whole'] == b['whole'] == 256 and a['handler'] and b['handler'] and not a['wrapped'] and not b['wrapped']
    if how in ('term', 'ctrl_c'):
        assert a['how'] == 'KeyboardInterrupt: a process was asked to stop' and b['how'] == f"KeyboardInterrupt: {dict(term='SIGTERM', ctrl_c='SIGINT')[how]}: stopped after the step"


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_a_metric_that_differs_stops_all_in_the_same_epoch(two, strategy):
    a, b = (r[strategy]['decided'] for r in two)
    assert a['early'] == b['early'] == [2, 3, 4, 5, 1, 2] and a['goal'] == b['goal'] == 1


def test_lr_find_has_one_answer(two):
    found = {r[s]['decided']['lr_find'] for r in two for s in STRATEGIES}
    assert len(found) == 1


def alone(folder, strategy):
    learn = processes.learner(Adam, data=processes.plain())
    learn.path = folder
    learn.metrics = [processes.accuracy, processes.F1Score(average='macro')]
    return learn.load(f'whole-{strategy}', weights_only=False)


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_a_file_of_several_is_one_of_one_process(two, folder, strategy):
    saved = torch.load(folder/'models'/f'whole-{strategy}.pth', weights_only=False)
    assert {type(o) for o in saved['model'].values()} == {torch.Tensor}
    assert [o['grad_avg'].shape for o in saved['opt']['state']] == [p.shape for p in processes.Net().parameters()]
    learn = alone(folder, strategy)
    with learn.no_bar(), learn.no_logging():
        want, (preds, targs) = learn.validate(), learn.get_preds()
    for r in two:
        got = r[strategy]['files']
        assert got['valid'] == pytest.approx([float(o) for o in want], rel=1e-5)
        assert torch.allclose(torch.tensor(got['preds']), preds, atol=1e-6) and got['targs'] == targs.tolist()


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_who_cannot_predict_tells_the_others(two, strategy):
    a, b = (r[strategy]['files']['fails'] for r in two)
    assert b.startswith('ValueError') and a.startswith('UserError') and ('process 1 could not predict' in a or 'another process has failed' in a)


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_refusals_are_one_line_and_leave_nothing_behind(two, strategy):
    for r in two:
        o = r[strategy]['refused']
        assert 'already: detach_distributed() first' in o['twice'] and 'in every process' in o['broken']
        assert o['after'] == ['Parameter']*6 + [256, 'Net', False]
        if strategy == 'fsdp': assert 'Muon needs whole matrices' in o['muon'] and "learn.to_half('bf16')" in o['fp16'] and 'inside of the block' in o['later']


def test_what_the_exchange_costs_is_seen_beside_the_training(two):
    "An exchange of 30 ms, two layers' worth of time after nothing that it could hide behind; on a clock that it alone moves, since a busy machine takes as long"
    a, b = (r['ddp']['exchanged'] for r in two)
    assert a['apart'] == b['apart'] == 0 and a['pairs'] == b['pairs'] and len(a['pairs']) == 4 and a['sync'] is not False
    for o in (a, b): assert o['exposed'] == pytest.approx(.03) and o['share'] == pytest.approx(1) and o['alone'] == pytest.approx(.06) and 'of the passes' in o['said']
    assert all("with the strategy 'ddp'" in r['fsdp']['exchanged'] for r in two)


def test_the_words_of_a_group(two, four):
    for n, ranks in ((2, two), (4, four)):
        for r in ranks: assert r['words'] == [[*range(n)], dict(a=0), [n, sum(range(n))], n - 1, True]


def test_a_group_of_somebody_else_leaves_the_environment_alone(four):
    assert all(r['told'] == dict.fromkeys(processes.NAMES) for r in four)


# without processes

def test_processes_that_have_not_joined_are_told_so(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    for f in (group.barrier, lambda: group.broadcast(1), lambda: group.sum_over_ranks([1]), lambda: group.any_rank(True)):
        with pytest.raises(UserError, match='not joined yet'): f()


NAMES = re.compile(r'num_distrib|rank_distrib|distrib_barrier')


def names_of_processes(src):
    "How a module reaches other processes by itself"
    for n in ast.walk(ast.parse(src)):
        if isinstance(n, ast.ImportFrom) and (n.module or '').startswith(('torch.distributed', 'fastai.distributed', 'accelerate')): yield n.module
        if isinstance(n, ast.ImportFrom): yield from (o.name for o in n.names if NAMES.fullmatch(o.name))
        if isinstance(n, ast.Import): yield from (o.name for o in n.names if o.name.startswith(('torch.distributed', 'fastai.distributed')))
        if isinstance(n, ast.Attribute) and ast.unparse(n).startswith('torch.distributed'): yield ast.unparse(n)


def test_only_the_group_and_strategies_name_torch_distributed():
    assert [*names_of_processes('import torch.distributed as dist\nfrom fastai.torch_core import num_distrib\ntorch.distributed.barrier()')] != []
    found = {p.relative_to(ROOT/'fastbench').as_posix(): {*names_of_processes(p.read_text(encoding='utf-8'))} for p in (ROOT/'fastbench').rglob('*.py')}
    allowed = {'machine/group.py', 'machine/shards.py', 'machine/shard_files.py', *(f'distributed/{o}.py' for o in ('strategy', 'ddp', 'fsdp', 'dealt', 'ranks'))}
    assert not {k: v for k, v in found.items() if v and k not in allowed}


@pytest.mark.parametrize('version,workers,pauses', [((3, 11, 7), 1, 1), ((3, 11, 7), 0, 0), ((3, 12, 0), 1, 0)])
def test_a_fork_of_workers_waits_for_the_threads_of_a_group(monkeypatch, version, workers, pauses):
    dl, slept = DataLoader([(torch.ones(2), 0)]*4, bs=2, num_workers=workers), []
    monkeypatch.setattr(group.sys, 'version_info', version)
    monkeypatch.setattr(group.time, 'sleep', slept.append)
    monkeypatch.setattr(group, 'is_joined', lambda: True)
    assert len(list(fastai_batches(dl))) == 2
    assert len(slept) == pauses
