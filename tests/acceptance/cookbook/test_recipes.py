"""tinker-cookbook's recipes, unchanged, on tiny models served under their default names: `make test-cookbook`."""

import json
from statistics import fmean

import pytest

from .data_sets import CHATS_FILE, QUESTION_SUFFIX
from .releases import BASE, GPT_OSS, KIMI, QWEN, UNLISTED
from .user import Cookbook, Run

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

RENDERERS = {BASE: "role_colon", QWEN: "qwen3_5", GPT_OSS: "gpt_oss_no_sysprompt", KIMI: "kimi_k26"}
LEARNING_RATE = 1e-2


def test_sl_loop_teaches(cookbook: Cookbook, taught: Run) -> None:
    check_taught(taught)
    check_reply(cookbook, BASE, taught)


def test_rl_loop_continues_what_sl_loop_taught(cookbook: Cookbook, taught: Run) -> None:
    check_rl_loop(cookbook, BASE, taught)


@pytest.mark.parametrize("model", [QWEN, GPT_OSS, KIMI])
def test_chat_sl_and_rl_loop_with_the_renderer_of(model: str, cookbook: Cookbook) -> None:
    log = f"chat-sl/{model}"
    taught = cookbook.recipe("chat_sl.train", log, model_name=model, batch_size=16, learning_rate=LEARNING_RATE)
    check_taught(taught)
    check_reply(cookbook, model, taught)
    check_rl_loop(cookbook, model, taught)


def test_chat_sl_with_a_model_that_the_cookbook_does_not_know(cookbook: Cookbook) -> None:
    options = {"renderer_name": "role_colon", "batch_size": 16, "learning_rate": LEARNING_RATE}
    check_taught(cookbook.recipe("chat_sl.train", "chat-sl/unlisted", model_name=UNLISTED, **options))


def check_taught(run: Run) -> None:
    """Both answers are as frequent: what cannot be learned is one bit of each reply."""
    losses = run.finite("train_mean_nll")
    assert len(losses) == 32 and losses[-1] < losses[0] / 20, losses
    assert run.finite("optimizer_step:last") == [*range(1, 33)]
    assert [each["name"] for each in run.checkpoints] == ["000020", "final"]


def check_reply(cookbook: Cookbook, model: str, taught: Run) -> None:
    question = "What is 1 plus 2?" + QUESTION_SUFFIX
    reply = json.loads(cookbook.program("chat", model, taught.checkpoints[-1]["sampler_path"], question))
    assert reply["renderer"] == RENDERERS[model]
    assert reply["text"] in ("\\boxed{3}", "\\boxed{4}")


def check_rl_loop(cookbook: Cookbook, model: str, taught: Run) -> None:
    """The recipe resumes from the last checkpoint in its logs, here a taught one; its loss is stable_reinforce."""
    log = f"rl-loop/{model}"
    (cookbook.folder / log).mkdir(parents=True)
    start = {"name": "taught", "batch": 0, "state_path": taught.checkpoints[-1]["state_path"]}
    (cookbook.folder / log / "checkpoints.jsonl").write_text(json.dumps(start) + "\n")
    run = cookbook.recipe("rl_loop", log, model_name=model, batch_size=4, group_size=8, max_tokens=24)
    assert all(0 < reward < 1 for reward in run.finite("reward/total")), run.metrics
    assert len(run.finite("loss/stable_reinforce")) == 2
    assert run.finite("optimizer_step:last") == [33, 34]
    assert run.checkpoints[-1]["sampler_path"]


def test_sl_basic_lowers_the_loss_on_held_out_rows(cookbook: Cookbook) -> None:
    run = cookbook.recipe("sl_basic", "sl-basic", learning_rate=LEARNING_RATE, num_epochs=2, eval_every=4)
    trained, tested = run.finite("train_mean_nll"), run.finite("test/nll")
    assert len(trained) == 8 and trained[-1] < trained[0] / 2, trained
    assert len(tested) == 2 and tested[1] < tested[0] / 1.5, tested
    assert run.checkpoints[-1]["sampler_path"]


def test_rl_basic_continues_what_sl_loop_taught(cookbook: Cookbook, taught: Run) -> None:
    start = taught.checkpoints[-1]["state_path"]
    run = cookbook.recipe("rl_basic", "rl-basic", max_tokens=24, load_checkpoint_path=start)
    check_rollouts(run, num_steps=1)
    assert run.finite("env/all/total_episodes") == [128]
    assert 0 < run.finite("env/all/correct")[0] < 1


def test_preference_with_the_default_model(cookbook: Cookbook) -> None:
    options = {"batch_size": 2, "group_size": 4, "max_steps": 2, "max_tokens": 24}
    run = cookbook.recipe("preference.shorter.train", "shorter", **options)
    check_rollouts(run, num_steps=2)
    assert len(run.finite("kl_pre_post_v1")) == 2


def test_game_of_many_turns_with_the_default_model(cookbook: Cookbook) -> None:
    options = {"batch_size": 1, "group_size": 2, "max_steps": 1, "max_tokens": 16, "eval_every": 0}
    run = cookbook.recipe("multiplayer_rl.guess_number.train", "guess-number", **options)
    check_rollouts(run, num_steps=1)
    assert run.finite("env/all/turns_per_episode") == [10]
    assert run.finite("env/all/total_cached_ob_tokens")[0] > 0


def test_twenty_questions_are_answered_by_the_server_too(cookbook: Cookbook) -> None:
    options = {"batch_size": 1, "group_size": 2, "max_steps": 1, "max_tokens": 16, "eval_every": 0}
    run = cookbook.recipe("multiplayer_rl.twenty_questions.train", "twenty-questions", **options)
    check_on_policy(run)
    assert run.finite("env/all/turns_per_episode") == [20]


def check_rollouts(run: Run, num_steps: int) -> None:
    """The sampler's log-probabilities are those that training computes."""
    assert all(sampled > 1 for sampled in run.finite("env/all/ac_tokens_per_turn"))
    assert len(run.finite("loss/importance_sampling")) == num_steps
    assert run.finite("optimizer_step:last") == [*range(1, num_steps + 1)]
    check_on_policy(run)


def check_on_policy(run: Run) -> None:
    assert all(distance < 1e-9 for distance in run.finite("optim/kl_sample_train_v2"))
    assert run.checkpoints[-1]["sampler_path"]


def test_math_rl_learns_the_format_of_arithmetic(cookbook: Cookbook) -> None:
    """A tiny model cannot add: it learns to end its replies, the tenth of the reward that is for the format."""
    options = {"groups_per_batch": 16, "group_size": 16, "learning_rate": LEARNING_RATE, "max_steps": 14}
    run = cookbook.recipe("math_rl.train", "arithmetic", env="arithmetic", **options)
    rewards = run.finite("env/all/reward/total")
    assert len(rewards) == 14 and rewards[0] < -0.09 and rewards[-1] > -0.05, rewards
    assert len(run.finite("loss/stable_reinforce")) == 14
    check_on_policy(run)


def test_math_rl_trains_on_samples_of_earlier_weights(cookbook: Cookbook) -> None:
    options = {"groups_per_batch": 4, "group_size": 8, "learning_rate": LEARNING_RATE, "max_steps": 6}
    run = cookbook.recipe("math_rl.train", "asynchronous", max_steps_off_policy=2, **options)
    assert run.finite("optimizer_step:last") == [*range(1, 7)]
    assert max(run.finite("async/staleness_max")) == 2
    # What makes them off-policy: the control of check_on_policy.
    assert max(run.finite("optim/kl_sample_train_v2")) > 1e-6


def test_math_rl_trains_on_minibatches_as_they_arrive(cookbook: Cookbook) -> None:
    options = {"groups_per_batch": 4, "group_size": 8, "learning_rate": LEARNING_RATE, "max_steps": 2}
    streamed = {
        f"stream_minibatch_config.{name}": value
        for name, value in {"groups_per_batch": 4, "num_minibatches": 2}.items()
    }
    run = cookbook.recipe("math_rl.train", "minibatches", **options, **streamed)
    assert run.finite("optimizer_step:last") == [1, 2]
    check_on_policy(run)


def test_dpo_prefers_what_was_chosen(cookbook: Cookbook) -> None:
    options = {"batch_size": 16, "learning_rate": 3e-3, "max_steps": 8}
    run = cookbook.recipe("preference.dpo.train", "dpo", **options)
    margins, losses = run.finite("margin"), run.finite("dpo_loss")
    # The reference is the model before the first step.
    assert abs(margins[0]) < 1e-3 and abs(losses[0] - 0.6931) < 1e-3
    assert margins == sorted(margins) and margins[-1] > 3, margins
    assert losses[-1] < 0.05 and run.finite("accuracy")[-1] == 1
    assert run.finite("chosen_reward")[-1] > 1 > -1 > run.finite("rejected_reward")[-1]


def test_dpo_learns_no_preference_from_pairs_that_contradict_each_other(cookbook: Cookbook) -> None:
    options = {"dataset": "ultrafeedback", "batch_size": 16, "learning_rate": 3e-3, "max_steps": 8}
    run = cookbook.recipe("preference.dpo.train", "dpo-of-coin-flips", **options)
    assert max(map(abs, run.finite("margin"))) < 1, run.metrics
    assert min(run.finite("dpo_loss")) > 0.4, run.metrics


def test_rlhf_pipeline(cookbook: Cookbook) -> None:
    """The three stages take each other's checkpoints: supervised, a reward model, reinforcement with it."""
    module = "tinker_cookbook.recipes.preference.rlhf.rlhf_pipeline"
    rates = ("sft_learning_rate=1e-2", "rm_learning_rate=3e-3")
    cookbook.run("-m", module, "batch_size=8", "max_steps=4", "rl_max_tokens=16", "eval_every=0", *rates)
    stages = {stage: cookbook.logged(f"runs/rlhf-qwen3_5_9b_base/{stage}") for stage in ("sft", "rm", "rl")}
    for stage in ("sft", "rm"):
        losses = stages[stage].finite("train_mean_nll")
        assert len(losses) == 4 and losses[-1] < losses[0] - 1, (stage, losses)
    check_on_policy(stages["rl"])
    assert len(stages["rl"].finite("env/all/win_minus_loss")) == 4


def test_on_policy_distillation_approaches_the_teacher(cookbook: Cookbook, taught: Run) -> None:
    teacher = {"teacher_model": BASE, "teacher_checkpoint": taught.checkpoints[-1]["sampler_path"]}
    options = {"groups_per_batch": 4, "group_size": 8, "max_tokens": 8, "learning_rate": 2e-2, "max_steps": 20}
    run = cookbook.recipe("distillation.on_policy_distillation", "on-policy", **teacher, **options)
    distances = run.finite("teacher_kl")
    assert len(distances) == 20 and fmean(distances[-3:]) < 0.85 * fmean(distances[:3]), distances
    check_on_policy(run)


def test_on_policy_distillation_measures_no_distance_between_equal_models(cookbook: Cookbook) -> None:
    """The tiny models of both names have the same weights."""
    options = {"groups_per_batch": 2, "group_size": 2, "max_tokens": 8, "max_steps": 1}
    run = cookbook.recipe("distillation.on_policy_distillation", "on-policy-of-itself", **options)
    assert abs(run.finite("teacher_kl")[0]) < 1e-5


def test_off_policy_distillation_learns_traces(cookbook: Cookbook) -> None:
    options = {"batch_size": 16, "max_prompts": 512, "buffer_size": 512, "max_steps": 24}
    run = cookbook.recipe("distillation.off_policy_reasoning", "off-policy", learning_rate=LEARNING_RATE, **options)
    losses = run.finite("train_mean_nll")
    assert len(losses) == 24 and losses[-1] < losses[0] / 10, losses


def test_a_student_learns_the_teachers_most_likely_tokens(cookbook: Cookbook, taught: Run) -> None:
    teacher = taught.checkpoints[-1]["sampler_path"]
    cookbook.program("soft_targets", BASE, teacher, CHATS_FILE, str(cookbook.folder / "soft"))
    run = cookbook.logged("soft")
    losses = run.finite("train/loss:sum")
    assert len(losses) == 32 and losses[-1] < losses[0] / 10, losses
    check_reply(cookbook, BASE, run)


def test_prompt_distillation_learns_a_file(cookbook: Cookbook) -> None:
    options = {"file_path": CHATS_FILE, "batch_size": 16, "learning_rate": LEARNING_RATE}
    run = cookbook.recipe("prompt_distillation.train", "prompts", **options)
    losses = run.finite("train_mean_nll")
    assert len(losses) == 32 and losses[-1] < losses[0] / 20, losses


def test_self_distillation_learns_from_itself_with_the_answer_in_view(cookbook: Cookbook) -> None:
    options = {"groups_per_batch": 8, "max_tokens": 16, "learning_rate": LEARNING_RATE, "max_steps": 4}
    run = cookbook.recipe("sdft.train", "sdft", **options)
    assert len(run.finite("loss/cross_entropy")) == 4
    assert min(run.finite("unclipped_grad_l2:mean")) > 0
    assert run.checkpoints[-1]["sampler_path"]
