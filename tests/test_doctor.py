"How many pairs it takes, against simulations; what is looked at, and what a trial that goes wrong says."
import json
import random
import sys
from math import expm1, log1p
from statistics import mean
from types import SimpleNamespace as NS

import pytest

from fastbench import cli
from fastbench.compare import doctor as module
from fastbench.bench import launch as launch_module
from fastbench.compare.doctor import Doctor, doctor, in_words, pairs_needed, sight, spread, trial
from fastbench.errors import UserError
from fastbench.runs.record import Run
from fastbench.runs.store import save
from fastbench.compare.verdict import MIN_RUNS, compare_times, t_quantile


# Pairs

@pytest.mark.parametrize('sd, effect, threshold', [(.03, .05, .01), (.1, .1, .01), (.02, .01, 0.), (.05, .05, .01)])
def test_the_slowdown_is_called_in_eighty_of_a_hundred(sd, effect, threshold):
    rng,n = random.Random(7),pairs_needed(sd, effect, threshold)
    def found(n, effect): return mean(compare_times([1.]*n, [rng.lognormvariate(log1p(effect), sd) for _ in range(n)], threshold=threshold).verdict == 'slower' for _ in range(400))
    assert .74 < found(n, effect) < .88
    assert found(max(MIN_RUNS, n//3), effect) < .6 and found(n, threshold) < .06


def test_it_is_what_compare_calls_detectable():
    for sd in (.004, .02, .2):
        for effect in (.02, .05, .1):
            n = pairs_needed(sd, effect)
            def detectable(n): return expm1(log1p(.01) + (t_quantile(.975, n-1) + t_quantile(.8, n-1))*sd/n**.5)
            assert detectable(n) <= effect and (n == MIN_RUNS or detectable(n-1) > effect)


def test_what_can_never_be_seen():
    assert pairs_needed(.01, .01) is None and pairs_needed(.01, .005, .01) is None and pairs_needed(float('inf'), .1) is None and pairs_needed(float('nan'), .1) is None
    assert pairs_needed(0., .05) == MIN_RUNS and pairs_needed(.05, .05, power=.95) > pairs_needed(.05, .05) and pairs_needed(.05, .05, level=.01) > pairs_needed(.05, .05)


def test_the_interval_of_the_spread_holds_it():
    rng,held = random.Random(3),0
    for _ in range(400):
        s = spread([rng.lognormvariate(1, .05) for _ in range(10)])
        held += s['low'] <= .05*2**.5 <= s['high']
        assert s['pairs'] == 5
    assert .92 < held/400 < .98


def test_drift_is_no_spread():
    "Neighbours are compared, as in pairs"
    assert spread([1.01**i for i in range(10)])['sd'] < .01 < spread([1.]*5 + [1.1]*5)['sd']
    for o in ([], [1.], [1., 2., 3.]):
        with pytest.raises(UserError, match='four or more'): spread(o)


def test_words():
    calm,wild = sight([1., 1.001, 1.002, 1.], 1.5),sight([1., 2., 1., 2.2], 1.5)
    assert [o['effect'] for o in calm] == [.01, .05, .10] and [o['threshold'] for o in calm] == [0., .01, .01] and calm[1]['pairs'] == MIN_RUNS and calm[1]['seconds'] == 15.
    assert in_words(calm[1], 'digits') == 'sees 5%: 5 pairs (between 5 and 5), about 15 s of digits'
    assert in_words(calm[0]).startswith('sees 1%') and '--threshold 0' in in_words(calm[0]) and in_words(wild[1]).startswith('does not see 5%') and 'days' in in_words(wild[0])
    for o in wild: assert o['low'] < o['pairs'] < o['high']


# The trial, with Runs that are not trained

@pytest.fixture
def launched(monkeypatch):
    asked = []
    asked_times = iter([9., *[1., 1.02]*50])
    def launch(r, folder, tell=None, **kwargs):
        asked.append((r, str(folder), kwargs))
        return str(save(Run(recipe=vars(r).copy(), seconds=next(asked_times), warnings=['busy machine: by 1. Stop it', f'busy machine: by {len(asked)}. Stop it']), folder))
    monkeypatch.setattr(launch_module, 'launch', launch)
    monkeypatch.setattr(module, '_now', lambda device: ({}, {}))
    return asked


def test_the_first_run_is_not_counted_and_nothing_is_kept(launched, tmp_path):
    t = trial(n=4, device='cpu')
    assert t['times'] == [1., 1.02, 1., 1.02] and len(launched) == 5 and t['each'] > 0 and t['warnings'] == ['busy machine: by 5. Stop it']
    r,folder,kwargs = launched[0]
    assert r.name == 'digits-xresnet18' and r.epochs == 1 and r.batches == 12 and kwargs == dict(device='cpu') and not any(map(module.os.path.exists, (o[1] for o in launched)))
    trial('photos-xresnet18', n=4, folder=tmp_path/'kept')
    assert len(list((tmp_path/'kept').iterdir())) == 5 and launched[-1][0].batches is None


def test_the_budget_ends_it(launched, monkeypatch):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(module.time, 'monotonic', lambda: next(clock))
    assert 1 < len(trial(n=100, budget=200)['times']) < 10
    found = doctor(n=10, budget=1e-9)
    assert found.sight is None and '0 runs within the budget' in found.notes[0]


def test_a_trial_that_fails_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(launch_module, 'launch', lambda r, folder, **kwargs: str(save(Run(recipe=vars(r).copy(), status='failed', error='RuntimeError: odd'), folder)))
    with pytest.raises(UserError, match='trial of digits-xresnet18 failed: RuntimeError: odd'): trial(n=4)


def test_what_doctor_says(launched):
    found = doctor(n=6)
    assert found.times == [1., 1.02]*3 and found.spread['pairs'] == 3 and [o['pairs'] for o in found.sight] and len(found.notes) == 4
    assert 'differ by 2.0%' in found.notes[0] and all(f'{o}%' in n for o,n in zip((1, 5, 10), found.notes[1:]))
    d = json.loads(found.to_json())
    assert d['sight'][1]['effect'] == .05 and d['spread']['low'] < d['spread']['sd'] < d['spread']['high'] and d['rows'] == found.rows
    assert [o['value'] for o in found.rows if o['part'] == 'trial'] == ['busy machine']


def test_a_trial_of_nothing_is_refused_at_once(launched):
    with pytest.raises(UserError, match='four or more'): doctor(n=3)
    with pytest.raises(UserError, match='nosuch'): doctor(recipe='nosuch')
    assert not launched


# What is looked at

def rows(found, part): return {o['what']: o for o in found.rows if o['part'] == part}


def test_what_there_is(monkeypatch, tmp_path):
    monkeypatch.setenv('FASTBENCH_HOME', str(tmp_path/'home'))
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path/'hub'))
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path/'fastai'))
    (tmp_path/'home'/'tokenizers'/'a').mkdir(parents=True)
    (tmp_path/'home'/'tokenizers'/'a'/'b').write_bytes(bytes(2_500_000))
    (tmp_path/'home'/'tokenizers'/'link').symlink_to(tmp_path)
    monkeypatch.setattr(module, '_version', lambda name: '1.2' if name == 'pyarrow' else None)
    monkeypatch.setattr(module, 'which', lambda name: None)
    monkeypatch.delenv('CXX', raising=False)
    found = doctor(run=False)
    c,o = rows(found, 'cache'),rows(found, 'optional')
    assert c['tokenizers']['value'] == '2.5 MB' and c['data']['value'] == 'empty' and c['hub']['note'] == str(tmp_path/'hub') and c['fastai']['value'] == 'empty'
    assert o['pyarrow']['value'] == '1.2' and o['wandb']['value'] == 'not installed' and 'Weights' in o['wandb']['note'] and o['C++ compiler']['value'] == 'not found'
    assert rows(found, 'precision')['fp32 on cpu']['value'] == 'yes' and rows(found, 'precision')['fp16 on cpu']['value'] == 'no' and rows(found, 'versions')['torch']
    assert 'trial was left out' in found.notes[0] and found.sight is None


def test_gpus(monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (7, 5))
    monkeypatch.setattr(module, 'device_info', lambda d: dict(name=f'GPU at {d}', memory=16*2**30, driver='575.1', power_limit=300.))
    monkeypatch.setattr(module, '_now', lambda device: (dict(device=device), {}))
    found = doctor(run=False)
    assert rows(found, 'device')['cuda:1'] == dict(part='device', what='cuda:1', value='GPU at cuda:1', note='16 GiB, driver 575.1, 300 W')
    p = rows(found, 'precision')
    assert p['fp16 on cuda:0']['value'] == 'yes' and p['bf16 on cuda:0']['value'] == 'no' and 'emulates' in p['bf16 on cuda:0']['note'] and p['fp16 on cpu']['value'] == 'no'


def test_a_busy_machine_is_told(monkeypatch):
    calm = dict(clock=0., logical=2, cpu_total=100., cpu_busy=50., cpu_own=5., load=.5, on_battery=True, cpu_mhz=2000.)
    monkeypatch.setattr(module, '_now', lambda device: (calm, {**calm, 'clock': 1., 'cpu_total': 102., 'cpu_busy': 51.9, 'load': 1.75}))
    found = [o for o in doctor(run=False).rows if o['part'] == 'now']
    assert [o['value'] for o in found] == ['1.75', '2,000 MHz', 'battery', 'busy machine', 'on battery']
    monkeypatch.setattr(module, '_now', lambda device: ({}, {}))
    assert [o['value'] for o in doctor(run=False).rows if o['part'] == 'now'] == ['none']


def test_hostile_names_stay_text():
    d = Doctor([dict(part='device', what='<script>', value='a|b', note=None)])
    assert '<script>' not in d._repr_html_() and 'a\\|b' in d.to_markdown() and str(d).startswith('fastbench doctor')


# The command

def command(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, 'argv', ['fastbench', 'doctor', *args])
    with pytest.raises(SystemExit) as e: cli.main()
    return (e.value.code or 0, *capsys.readouterr())


def test_command(launched, monkeypatch, capsys):
    code,out,err = command(monkeypatch, capsys, '--runs', '4', '--json', '--budget', '10m')
    assert code == 0 and json.loads(out)['times'] == [1., 1.02, 1., 1.02] and 'trial 4 of 4' in err
    code,out,_ = command(monkeypatch, capsys, '--no-trial')
    assert code == 0 and 'trial was left out' in out and len(launched) == 5


@pytest.mark.parametrize('args, why', [('--runs 3', '--runs'), ('--budget soon', 'is not a time'), ('--recipe nosuch', 'nosuch')])
def test_mistakes(launched, monkeypatch, capsys, args, why):
    code,out,err = command(monkeypatch, capsys, *args.split())
    assert code == 2 and why in err and 'Traceback' not in err and not launched


def test_a_signal(monkeypatch, capsys):
    def launch(*args, **kwargs): raise launch_module.Interrupted(15)
    monkeypatch.setattr(launch_module, 'launch', launch)
    code,out,err = command(monkeypatch, capsys)
    assert code == 143 and out == '' and 'interrupted' in err


def test_a_real_trial(monkeypatch):
    monkeypatch.setattr(module, 'SHORT', dict(epochs=1, batches=2, sample=.1, size=8))
    t = trial(n=4, device='cpu')
    assert len(t['times']) == 4 and all(0 < o < t['each']*4 for o in t['times']) and spread(t['times'])['sd'] >= 0
