"Two processes (gloo, CPU) with the loaders and losses that people bring: equal to one process with the batches of both, or refused in one line"
import json

import pytest

pytest.importorskip('accelerate')
import dealt_ranks
import processes
import torch
from fastai.callback.core import Callback
from fastai.callback.channelslast import ChannelsLast as FastaiChannelsLast
from fastbench.callback.channelslast import ChannelsLast
from fastbench.errors import UserError
from started import done_by_all

STRATEGIES = 'ddp', 'fsdp'


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    folder = done_by_all('dealt_ranks.py', tmp_path_factory.mktemp('dealt'), processes.NAMES)
    return [json.loads((folder/'two'/f'{i}.json').read_text()) for i in range(2)]


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('name', dealt_ranks.CASES)
def test_two_processes_train_as_one_with_the_batches_of_both(two, strategy, name):
    "Class weights, targets that are ignored, drop_last, and what a loader of PyTorch was given"
    for r in two:
        o = r[strategy]['equal'][name]
        assert o['apart'] < 1e-6 and o['numbers'][0] == o['numbers'][1]
        for k in ('losses', 'lrs', 'pct') + ('values',)*(name in ('language_model', 'torch_loader')): assert o['got'][k] == pytest.approx(o['want'][k], abs=1e-5), k


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_metrics_of_segmentation_and_translation_are_those_of_the_whole_set(two, strategy):
    for r in two: assert r[strategy]['metrics']['got'] == pytest.approx(r[strategy]['metrics']['want'], abs=1e-5)


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_a_loss_that_is_no_mean_over_its_targets_is_said_once(two, strategy):
    "By the first process, without a number drawn"
    for i, r in enumerate(two):
        for name, (lines, numbers) in r[strategy]['lines'].items():
            assert len(lines) == (i == 0 and name in ('smooth', 'of_pairs')), name
            assert len(set(numbers)) == 1
            if lines: assert {'smooth': 'LabelSmoothingCrossEntropy', 'of_pairs': 'of_pairs'}[name] in lines[0] and 'learn.n_targets' in lines[0] and '\n' not in lines[0]


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_after_the_block_each_process_predicts_by_itself(two, strategy):
    "Also one alone, while the group of torchrun is still there"
    (n, (m, loss), valid), (other, _, _) = (r[strategy]['afterwards'] for r in two)
    assert n == m == other == dealt_ranks.N and loss == valid


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_a_language_model_of_fastai_predicts_whole_rows(two, strategy):
    for r in two:
        got, want = r[strategy]['rows']['got'], r[strategy]['rows']['want']
        assert got[0] == pytest.approx(want[0], rel=1e-4) and got[1:] == want[1:] and got[1] == 2


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_the_first_process_writes_the_history(two, strategy):
    for r in two: assert r[strategy]['history'] == ['epoch', '0', '1']*2


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_the_process_with_the_bar_draws_the_graph(two, strategy):
    for r in two: assert r[strategy]['graph'] is None


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_lr_find_goes_through_all_learning_rates(two, strategy):
    for r in two:
        o = r[strategy]['lr_find']
        assert o['got']['lrs'] == pytest.approx(o['want']['lrs']) and len(o['got']['lrs']) == 20
        assert o['got']['losses'] == pytest.approx(o['want']['losses'], rel=1e-4)


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('name,why', [('too_few', '10 items are less than one batch of all processes, 2 x 8'), ('few_tokens', '4 tokens are not enough for 2 x 2 rows'), ('stream', 'a stream'), ('fastai_stream', 'a stream'), ('dealt', 'DistributedSampler'),
                                      ('by_batches', 'OwnBatches'), ('own', '__iter__ of its own'), ('own_batches', 'Fixed: what its own create_batches makes'), ('own_sample', 'DataLoader: what its own sample draws'), ('strange', 'list_iterator')])
def test_loaders_that_cannot_be_dealt_are_refused_in_one_line(two, strategy, name, why):
    for r in two:
        said = r[strategy]['refused'][name]
        assert said and said.startswith('UserError') and why in said.splitlines()[-1] and len(said.splitlines()) < 3, said  # fastai's line is before it


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_processes_with_another_split_each_are_refused_in_one_line(two, strategy):
    for r in two: assert 'processes 0 and 1 have not the same items for training' in r[strategy]['split'] and len(r[strategy]['split'].splitlines()) < 3


def test_workers_are_prepared_and_the_order_is_that_of_the_generator(two):
    for loss, untouched in (r['workers'] for r in two): assert loss == loss and not untouched


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_a_step_that_some_processes_skip_is_an_error_in_all(two, strategy):
    for r in two: assert r[strategy]['alone'].startswith('UserError: the optimizer stepped in some processes only')


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('what', dealt_ranks.LEFT)
def test_what_one_process_leaves_all_leave_and_a_batch_of_one_is_an_error_in_all(two, strategy, what):
    "Epochs of four batches: all end at the second one, or train on after it, with the same weights"
    steps = dict(batch=6, backward=8, epoch=2, fit=1)[what.split('-')[1]]
    for r in two:
        o = r[strategy]['left'][what]
        assert o['by_all'] == [None, [steps]*2, 1]
        if steps < 3: assert o['by_one'] == o['by_all']
        else:
            line, n, _ = o['by_one']
            assert line.startswith('UserError') and line.splitlines()[-1].strip().removeprefix('UserError: ').startswith('process 1 left out batch 2 of the epoch') and 'any_rank' in line and n == [1, 1]


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('what', dealt_ranks.OUTSIDE)
def test_what_one_process_ends_outside_of_a_batch_all_end(two, strategy, what):
    "Epochs of four batches: in the second of three, as if all had ended it"
    for r in two:
        o = r[strategy]['ended'][what]
        assert o['by_one'] == o['by_all'] and o['by_all'][0] is None and o['by_all'][2] == 1, o
        (steps, epochs), other = o['by_all'][1]
        assert [steps, epochs] == other
        event, why, order, _ = what.split(':')
        if why == 'fit' and 'cancel' not in event: assert steps == (4 if event in ('before_epoch', 'before_train') else 8) and epochs == 1 + (event == 'after_epoch' and order == '200')


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_a_validation_on_its_own_ends_in_all(two, strategy):
    for r in two: assert r[strategy]['validated'] == ['CancelFitException: ']*2


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_an_unknown_option_of_a_strategy_is_named(two, strategy):
    for r in two: assert r[strategy]['option'].startswith(f"UserError: unknown option of strategy '{strategy}' 'cpus'; did you mean 'cpu'?")


def test_a_learner_is_exported_without_the_processes(two):
    for r in two:
        names, shape, n = r['ddp']['exported']
        assert shape == [3, 4] and n == 2 and not {'RankTrainer', 'WeighShares', 'DecideTogether'} & set(names)
        assert r['fsdp']['exported'].startswith('UserError: with fsdp each process holds a part')


def test_weights_that_nothing_uses_are_named(two):
    for r in two:
        line = r['ddp']['unused'].splitlines()[-1]
        assert r['ddp']['unused'].startswith('UserError') and 'spare.weight, spare.bias' in line and "strategy='fsdp'" in line
        assert r['fsdp']['unused'] is None


TOLD = dict(MIXED_PRECISION=('bf16', "mixed_precision='bf16'.*the Learner trains in fp32"), DYNAMO_BACKEND=('INDUCTOR', 'ACCELERATE_DYNAMO_BACKEND=inductor.*learn.compile'), USE_FSDP=('true', "strategy='fsdp'"))


@pytest.mark.parametrize('name', TOLD)
def test_what_accelerate_launch_says_of_the_model_is_refused(monkeypatch, name):
    value, why = TOLD[name]
    monkeypatch.setenv(f'ACCELERATE_{name}', value)
    learn = dealt_ranks.learner()
    with pytest.raises(UserError, match=why), learn.distributed('ddp', cpu=True, tell=lambda o: None): dealt_ranks.fit(learn, 1)


def test_options_of_accelerate_go_through_the_learner():
    learn = dealt_ranks.learner()
    with pytest.raises(UserError, match="tell the Learner"), learn.distributed('ddp', cpu=True, mixed_precision='bf16', tell=lambda o: None): dealt_ranks.fit(learn, 1)
    with learn.distributed('ddp', cpu=True, mixed_precision='no', tell=lambda o: None): dealt_ranks.fit(learn, 1)


@pytest.mark.parametrize('made', [FastaiChannelsLast, ChannelsLast])
def test_channels_last_is_for_whole_weights(made):
    "It ended in an error of PyTorch about DTensors"
    learn = dealt_ranks.learner(model=torch.nn.Sequential(torch.nn.Conv2d(1, 3, 2), torch.nn.Flatten()))
    learn.add_cb(made())
    with pytest.raises(UserError, match=r"channels-last.*'fsdp' cuts.*to_contiguous"), learn.distributed('fsdp', cpu=True, tell=lambda o: None): pass
    learn.to_contiguous()
    with learn.distributed('fsdp', cpu=True, tell=lambda o: None): pass


def test_a_gan_is_for_whole_weights():
    "Its losses call the generator and the critic themselves"
    learn = dealt_ranks.learner()
    learn.add_cb(type('GANTrainer', (Callback,), {})())
    with pytest.raises(UserError, match="GAN's losses.*strategy='ddp'"), learn.distributed('fsdp', cpu=True, tell=lambda o: None): pass
