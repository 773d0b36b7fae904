"A training of two processes that is killed, stopped or hindered goes on as one that was not; in another number of processes with the same weights, optimizer, schedule and count of steps"
import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip('accelerate')
if not hasattr(os, 'fork'): pytest.skip('processes are forked here', allow_module_level=True)

from fastbench.bench.processes import launch_processes
from fastbench.recipe import get_recipe
from fastbench.runs.store import load
from started import outcome

HERE = Path(__file__).parent
ROUNDING = 1e-6  # two processes by Gloo on one machine were equal bit for bit


@pytest.fixture(scope='module')
def seen(tmp_path_factory):
    "What all processes of all trainings saw: `resume_ranks.py` imports once, and forks"
    folder = tmp_path_factory.mktemp('resume')
    env = {k: v for k, v in os.environ.items() if k not in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK')} | dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(HERE), str(HERE.parent)]))
    code, said = outcome(HERE/'resume_ranks.py', folder, env=env)
    assert not code and (folder/'result.json').exists(), said[-6000:]
    res = json.loads((folder/'result.json').read_text())
    res['planted'] = (folder/'planted').exists()
    return res


def apart(a, b):
    "The largest difference of two trainings"
    flat = [[x for k in ('losses', 'lrs') for x in o[k]] + [x for k in ('values', 'weights') for row in o[k] for x in row] for o in (a, b)]
    assert len(flat[0]) == len(flat[1]) > 50
    return max(abs(x - y) for x, y in zip(*flat))


@pytest.mark.parametrize('case', ['ddp', 'fsdp', 'average', 'collected'])
def test_a_killed_process_and_the_same_number_again(case, seen):
    got = seen[case]
    assert got['killed'][1] == -signal.SIGKILL and 'error' in got['killed'][0] and len(got['whole'][0]['losses']) == 15
    for whole, same in zip(got['whole'], got['same']):
        assert 'error' not in same, same
        assert same['resumed'] == [8] and apart(whole, same) < ROUNDING and same['own'] == []
    assert got['same'][0]['lines'] == ['going on from HERE/models/checkpoints/checkpoint-000002: epoch 1, after 3 of its steps'] and got['same'][1]['lines'] == []


@pytest.mark.parametrize('case, parts', [('ddp', []), ('fsdp', ['parts/.metadata', 'parts/__0_0.distcp', 'parts/__1_0.distcp'])])
def test_weights_are_written_once_or_in_parts(case, parts, seen):
    got = seen[case]
    assert [o.split('checkpoint-000002/')[1] for o in got['files']] == ['header.json', *parts, 'rank-0.pt', 'rank-1.pt', 'state.pt']
    assert got['header'] == dict(train_iter=8, world_size=2, sharded=bool(parts), tied={'b.weight': 'a.weight'}, steps=3) and got['hidden'] == ['.lock']


@pytest.mark.parametrize('case, there, n', [('ddp', 'on_4', 4), ('ddp', 'on_1', 1), ('fsdp', 'on_4', 4), ('fsdp', 'on_1', 1), ('fsdp', 'as_ddp', 2), ('one', 'ddp', 2), ('one', 'fsdp', 2)])
def test_another_number_of_processes_goes_on(case, there, n, seen):
    want = seen['one']['one'][0]['digests']['8'] if case == 'one' else seen[case]['whole'][0]['digests']['8']
    for o in (ranks := seen[case][there]):
        assert 'error' not in o, o
        assert o['digests']['8'] == want and o['resumed'] == [8]  # weights and optimizer to the last bit, place and learning rate of the schedule
    o, per_epoch = ranks[0], dict(on_1=10).get(there, 5)
    at = {1: 3, 2: 4 if case == 'one' else 3, 4: 3}[n]*per_epoch//5 if case != 'one' else 4
    assert len(ranks) == n and o['losses'][-1] < 1.2
    if there != 'as_ddp':
        m = 1 if case == 'one' else 2
        assert o['lines'][1].startswith(f'it was written by {m} process{"es"*(m > 1)} and goes on in {n}: weights, optimizer, schedule') and len(o['lines']) == 2
    else: assert len(o['lines']) == 1


@pytest.mark.parametrize('case', ['ddp', 'fsdp'])
def test_whole_weights_for_others(case, seen):
    got = seen[case]
    assert got['exported']['tied'] and got['exported']['weights'] == got['same'][0]['weights'] == got['trained']


def test_a_signal_to_one_process_stops_all_after_the_same_step(seen):
    got = seen['asked']
    assert [o['error'] for o in got['first']] == ['exit 143']*2 and got['at'] == 12
    for whole, then in zip(seen['ddp']['whole'], got['then']): assert then['resumed'] == [12] and apart(whole, then) < ROUNDING


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_a_process_that_cannot_write_makes_it_no_checkpoint(strategy, seen):
    got = seen[f'hindered_{strategy}']
    first, second = got['ranks']
    assert len(first['lines']) == len(first['failed']) == len(second['failed']) >= 3 and second['lines'] == []
    assert all(o.startswith('no checkpoint after step') and '(process 1: [Errno 27] File too large' in o and '\n' not in o for o in first['lines']), first['lines']
    assert apart(seen[strategy]['whole'][0], first) < ROUNDING and not [o for o in got['left'] if o.startswith('.new')] and len(got['left']) == 3


@pytest.mark.parametrize('bad, rank, why', [
    ('another', 0, 'is of another training: body.0.weight is 16x6 there and 17x6 here'), ('torn', 1, 'is damaged .rank-1.pt has '), ('common', 0, 'is damaged .state.pt has'),
    ('part', 0, 'is damaged .parts/__1_0.distcp has'), ('planted', 0, 'is damaged .*mkdir is nothing that torch.distributed.checkpoint writes'), ('gone', 1, 'is damaged .it has no rank-1.pt'),
    ('headless', 0, 'is damaged .it has no header.json')])
def test_a_bad_checkpoint_is_the_error_of_one_process(bad, rank, why, seen):
    import re
    errors = [o['error'] for o in seen[f'bad_{bad}']]
    assert re.search(why, errors[rank]) and errors[rank].startswith('CheckpointError: ') and '\n' not in errors[rank], errors
    assert 'OtherFailed' in errors[1-rank] and f'another process has failed (process {rank}: ' in errors[1-rank] and not seen['planted']


def test_processes_that_train_apart_are_told_so(seen):
    assert all('2 processes were started, but each trains by itself' in o['error'] for o in seen['apart'])


def test_processes_that_are_started_anew_go_on_from_the_last_checkpoint(tmp_path):
    trouble = str(HERE/'examples'/'trouble.py') + ':make'
    def launched(what, **options): return load(launch_processes(get_recipe(trouble, what=what), 2, tmp_path/what.replace(' ', '-'), device='cpu', **options))
    whole, cut = launched('nothing'), launched('killed once', max_restarts=1, checkpoint_every='3steps')
    assert cut.status == 'ok' and cut.resumed['steps'] == [3] and cut.seconds is None and not whole.resumed
    assert cut.metrics == pytest.approx(whole.metrics, abs=ROUNDING) and cut.metrics and not (tmp_path/'killed-once'/'checkpoints').exists()
