"""Trainings on a device that is not the CPU, on torch's meta device: what they leave on the CPU fails."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from autoshard.core import Tier
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.space.placement import PlacementProblem
from autoshard.runtime.processes.learners import Learners
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import FeatureScaling, shard_features
from costmodel.kernel.training import CostFit, train_cost_model
from costmodel.kernel.training import CostTrainingOptions as CostOptions
from costmodel.kernel.updates.batches import DeviceSamples
from env import PlacementVecEnv
from policies.algorithms.ppo import PlacementPPO
from policies.algorithms.training_options import PPOSettings, TrainingOptions, VTraceSettings
from policies.algorithms.vtrace import VTrace
from policies.choices import Algorithm, RewardSource
from policies.network.actor_critic import PlacementPolicy
from policies.network.weights import to_arrays
from policies.rollout.actors import ActorSetup, Order, Player
from policies.rollout.lagged import LaggedVTrace
from policies.training.joint import JointTrainer
from policies.training.joint_cost import JointCost
from policies.training.trainer import Budget, PolicyTrainer
from policies.training.training_log import make_logger
from tests import builders as make
from tests.policies.test_actors import PlayersHere

CPU = torch.device("cpu")
META = torch.device("meta")
#: They carry numbers from one device to the other, or make views; none of them computes.
CARRIERS = {"_to_copy", "copy_", "detach", "alias", "lift_fresh", "select", "slice", "unsqueeze", "view", "empty"}


class NothingOnTheCpu(TorchDispatchMode):
    """Fails at every operation that computes with tensors of the CPU, and answers what the host asks of a tensor.

    It counts how often the host waits for the device: for numbers, and for copies to it that are not queued.
    """

    def __init__(self):
        super().__init__()
        self.num_operations = self.num_waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].device == META:  # for logs; it has no number
            self.num_waits += 1
            return 0.0
        if name == "_to_copy":
            source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            self.num_waits += source != target and not kwargs.get("non_blocking")
            if (source, target) == (META, torch.device("cpu")):
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
        result = func(*args, **(kwargs or {}))
        if name not in CARRIERS:
            self.num_operations += 1
            tensors = [one for one in tree_flatten((args, kwargs, result))[0] if isinstance(one, torch.Tensor)]
            left = [one.shape for one in tensors if one.device.type == "cpu" and one.ndim > 0]
            assert not left, f"{func} computes with tensors of shapes {left} on the CPU"
        return result


@pytest.fixture(autouse=True)
def fused_kernels(monkeypatch):
    """Optimizers take fused kernels on the meta device as on a GPU."""
    import torch.optim.optimizer as module

    supported = module._get_fused_kernels_supported_devices()
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: [*supported, "meta"])


@pytest.fixture(scope="module")
def dataset(cost):
    locals_ = PlacementProblem.table_wise(make.pool(range(1, 9)), make.topology(1), cost).locals_by(Tier.TABLE_WISE)
    return CostDataset(
        shards_U=locals_,
        features_UF=shard_features(locals_),
        shard_N=np.arange(400) % 8,
        num_shards_S=np.full(100, 4),
        set_S=np.arange(100),
        latency_ms_SO=np.full((100, 2), 3.0),
    )


def test_the_mode_notices_what_is_left_on_the_cpu():
    on_cpu = torch.arange(3.0)
    with NothingOnTheCpu(), pytest.raises(AssertionError, match=r"on the CPU"):
        on_cpu.exp()
    with NothingOnTheCpu(), pytest.raises(RuntimeError, match="device"):
        torch.empty(3, device=META) + on_cpu


def test_the_mode_counts_waits():
    on_host = torch.arange(3.0)
    with NothingOnTheCpu() as mode:
        on_device = on_host.to(META, non_blocking=True)
        assert mode.num_waits == 0
        on_host.to(META)
        float(on_device.sum())
        on_device.cpu().tolist()
    assert mode.num_waits == 3


def test_an_update_of_the_cost_model_leaves_nothing_on_the_cpu(dataset):
    options, rng = CostOptions(batch_size=16), np.random.default_rng(0)
    fit = CostFit(dataset, 1.0, options, rng, Learners(device=META))
    scaled_UF = FeatureScaling.fit(dataset.features_UF).apply(dataset.features_UF)
    samples = DeviceSamples(dataset, scaled_UF, 1.0, META)
    with NothingOnTheCpu() as mode:
        loss = fit.update(samples.batch(np.arange(16), rng))
    assert loss.device == META
    assert mode.num_operations > 100
    assert mode.num_waits == 0
    assert {parameter.device for parameter in fit.network.parameters()} == {META}
    assert all(parameter.grad is not None for parameter in fit.network.parameters())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"algorithm": Algorithm.PPO}, "algorithm: must be vtrace in several processes, got ppo"),
        ({"reward": RewardSource.MEASURED}, "reward: must be model in several processes"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(make_problem, options, told):
    problems = [make_problem([1.0, 2.0, 3.0, 4.0])] * 2
    with pytest.raises(InvalidOptionError, match=told):
        PolicyTrainer(problems, problems, options=TrainingOptions(**options), learners=Learners(world_size=2))


class Pool:
    """What a player on the CPU has played, again and again."""

    def __init__(self, played):
        self._played = played

    def take(self, _weights):
        return self._played, 1


def on_meta(policy, *others):
    """Moves a policy to the meta device. Its weights are other objects there, so it gets an optimizer of these."""
    policy.to(META)
    weights = [parameter for module in (policy.network, *others) for parameter in module.parameters()]
    policy.optimizer = torch.optim.Adam(weights, lr=1e-3)


@pytest.mark.parametrize("whole_episodes", [False, True])
@pytest.mark.parametrize("compare", [False, True])
def test_an_update_of_v_trace_leaves_nothing_on_the_cpu(make_tasks, whole_episodes, compare):
    settings = VTraceSettings(num_steps=6, whole_episodes=whole_episodes, compare_within_task=compare)
    tasks = make_tasks(3)
    env = PlacementVecEnv(tasks, num_groups=2, num_rollouts=3)
    setup = ActorSetup(tasks=tuple(tasks), num_groups=2, num_rollouts=3, settings=settings, seed=0)
    weights = to_arrays(VTrace(PlacementPolicy, env, settings, seed=0).policy.network)
    played = Player(setup).play(Order(number=0, weights=weights))
    learner = LaggedVTrace(env, settings, Pool(played), seed=0, learners=Learners(device=META))
    learner.set_logger(make_logger(None))
    on_meta(learner.policy)
    learner.trajectories = played.trajectories(learner.policy)
    assert learner.trajectories.rewards_TE.device == META
    with NothingOnTheCpu() as mode:
        learner.train()
    assert mode.num_operations > 100
    assert mode.num_waits == 1  # what logs tell, at the end
    assert {parameter.device for parameter in learner.policy.parameters()} == {META}
    assert all(parameter.grad is not None for parameter in learner.policy.network.parameters())


def test_what_ppo_learns_from_is_on_the_device(make_tasks):
    """stable-baselines3 makes the updates; the batches and all that they go through are of this project."""
    env = PlacementVecEnv(make_tasks(3), num_groups=2, num_rollouts=2)
    learner = PlacementPPO(env, PPOSettings(), num_steps=6, seed=0, device=META)
    on_meta(learner.policy)
    learner.rollout_buffer.full = True
    batch = next(learner.rollout_buffer.get(12))
    with NothingOnTheCpu() as mode:
        values_B, log_probs_B, entropy_B = learner.policy.evaluate_actions(batch.observations, batch.actions.long())
        (values_B.sum() + (log_probs_B * batch.advantages).sum() + entropy_B.sum()).backward()
        learner.policy.optimizer.step()
    assert mode.num_operations > 50
    assert {values_B.device, log_probs_B.device, entropy_B.device} == {META}


def test_an_update_of_joint_training_leaves_nothing_on_the_cpu(dataset):
    """The learner's update, whose gradients reach the cost model, and the cost model's own."""
    cost = JointCost(dataset, device="cpu", seed=0)
    tables = make.pool(range(1, 7))
    problems = [PlacementProblem.table_wise(tables, make.topology(2), cost.model())] * 4
    options = TrainingOptions(num_groups=2, num_rollouts=3)
    trainer = JointTrainer(problems[:3], problems[3:], cost=cost, options=options, seed=0)
    trainer.update()
    cost.network.to(META)
    cost.learners = Learners(device=META)
    cost.optimizer = torch.optim.Adam(cost.network.parameters())
    on_meta(trainer.algorithm.policy, cost.encoder)
    trainer.algorithm.trajectories = moved(trainer.algorithm.trajectories)
    with NothingOnTheCpu() as mode:
        trainer.algorithm.train()
    assert mode.num_operations > 100
    assert mode.num_waits == 1
    assert all(parameter.grad is not None for parameter in cost.encoder.parameters())
    with NothingOnTheCpu() as mode:
        cost.train()
    assert mode.num_operations > 100
    assert mode.num_waits == 0  # in 20 updates
    assert {parameter.device for parameter in cost.network.parameters()} == {META}


def moved(data):
    """Trajectories whose numbers are on the meta device; starts and tasks stay."""
    columns = ("actions_TE", "log_probs_TE", "rewards_TE", "dones_TE")
    return replace(
        data,
        observations={key: value.to(META) for key, value in data.observations.items()},
        last_observation={key: value.to(META) for key, value in data.last_observation.items()},
        before=tuple(value.to(META) for value in data.before),
        **{name: getattr(data, name).to(META) for name in columns},
    )


def test_mixed_precision_rounds_what_is_learned_and_keeps_weights_in_fp32(make_tasks):
    def learned(mixed_precision):
        env = PlacementVecEnv(make_tasks(3), num_groups=2, num_rollouts=3)
        learners = Learners(mixed_precision=mixed_precision)
        algorithm = VTrace(PlacementPolicy, env, VTraceSettings(num_steps=6), seed=0, learners=learners)
        algorithm.set_logger(make_logger(None))
        algorithm.learn(6 * env.num_envs, log_interval=None)
        return torch.cat([parameter.detach().flatten() for parameter in algorithm.policy.parameters()])

    exact, rounded = learned(False), learned(True)
    assert rounded.dtype is torch.float32
    assert not torch.equal(rounded, exact)
    # Adam's first step is the learning rate, 0.001, whatever the gradient's size.
    assert (rounded - exact).abs().max() <= 0.002 + 1e-6
    assert (rounded - exact).abs().mean() < 0.0002


def test_a_cost_model_learns_the_same_on_any_device(dataset, any_device):
    options = CostOptions(num_updates=20, batch_size=16)
    found = [
        train_cost_model(dataset, device="cpu", options=options, learners=Learners(device=device)).model
        for device in (CPU, torch.device(any_device))
    ]
    for name, value in found[0].tensors().items():
        assert found[1].tensors()[name] == pytest.approx(value, rel=0.01, abs=1e-3), name


@pytest.mark.parametrize("num_actors", [0, 1])
def test_a_training_begun_on_a_device_goes_on_on_the_cpu(make_problem, tmp_path, num_actors, any_device):
    problems = [make_problem([1.0, 2.0, 3.0, 4.0])] * 2
    options = TrainingOptions(num_groups=2, num_rollouts=2, num_actors=num_actors)
    there = torch.device(any_device)
    back = ((4, there),) if there != CPU else ()
    for num_updates, device in ((2, there), (3, CPU), *back):
        learners = Learners(device=device)
        trainer = PolicyTrainer(problems, problems, options=options, launcher=PlayersHere(), learners=learners)
        trainer.run(Budget(num_updates=num_updates), folder=tmp_path)
        assert trainer.num_updates == num_updates
        assert {parameter.device.type for parameter in trainer.network.parameters()} == {device.type}
