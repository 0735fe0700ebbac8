"""PrivateTrainer: clipped gradients against a loop over single examples, losses, logs, what Trainer does besides."""

import math
from functools import partial

import oracle
import pytest
import torch

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("accelerate")

import tiny_trainers as tt  # noqa: E402

from ghostclip.integrations.huggingface import PrivacyArguments  # noqa: E402
from ghostclip.integrations.huggingface_losses import losses_for  # noqa: E402

pytestmark = pytest.mark.usefixtures("coarse_losses")

CASES = {
    "causal language model": (tt.gpt2, tt.text, 1),
    "masked language model": (lambda: tt.bert("MaskedLM"), tt.masked_text, 0),
    "token classification": (lambda: tt.bert("TokenClassification"), tt.labelled_tokens, 0),
    "sequence classification": (lambda: tt.bert("SequenceClassification"), tt.labelled_text, None),
    "image classification": (tt.vit, tt.image, None),
    "sequence to sequence": (tt.t5, tt.translation, 0),
}
CLIPPING = 0.3


def hand_loss(model, example, shift):
    """The loss of one example, token by token, by the definition."""
    inputs = {name: value[None] for name, value in example.items()}
    if not model.config.is_encoder_decoder:
        inputs.pop("labels")
    logits = model(**inputs).logits[0]
    if shift is None:
        return -logits.log_softmax(-1)[example["labels"]]
    wanted = [(place - shift, int(label)) for place, label in enumerate(example["labels"]) if label != tt.IGNORED]
    losses = [-logits[place].log_softmax(-1)[label] for place, label in wanted if place >= 0]
    return torch.stack(losses).mean() if losses else logits.sum() * 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(2)
def test_a_step_is_the_clipped_sum_of_a_loop_over_examples(name, tmp_path):
    build, example, shift = CASES[name]
    model, examples = build().double(), tt.data(example)
    losses = torch.stack([hand_loss(model, example, shift) for example in examples])
    grads = oracle.grads_of_single_losses(model, losses)
    assert oracle.norms(grads).max() > CLIPPING
    before = [parameter.detach().clone() for parameter in model.parameters()]
    privacy = PrivacyArguments(noise_multiplier=0.0, clipping=CLIPPING)
    tt.trainer(tmp_path, model, examples, privacy, max_steps=1).train()
    exact = {"rtol": 1e-4, "atol": 1e-6} if name == "sequence to sequence" else {"rtol": 1e-5, "atol": 1e-11}
    for was, now, total in zip(before, model.parameters(), oracle.clipped_sum(grads, CLIPPING).values(), strict=True):
        # The weights are clipped with a margin for rounding, of some 1e-6.
        torch.testing.assert_close((was - now.detach()) / 0.5, total / len(examples), **exact)


def bert_of(labels, kind):
    """A classifier by numbers or by several labels at a time, and such an example."""
    config = transformers.BertConfig(
        **tt.bert("MaskedLM").config.to_dict() | {"num_labels": labels, "problem_type": kind}
    )
    build = partial(transformers.BertForSequenceClassification, config)
    return build, lambda: {"input_ids": tt.tokens(), "labels": torch.rand(labels).round()}


MORE = {
    "a number": bert_of(1, None), "numbers": bert_of(3, "regression"),
    "labels": bert_of(3, "multi_label_classification"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_losses_are_those_of_the_model_on_single_examples(name):
    build, example, *_ = (CASES | MORE)[name]
    model, examples = build().eval(), tt.data(example)
    if name == "image classification":
        examples = [{**each, "pixel_values": each["pixel_values"].float()} for each in examples]
    own = [model(**{key: value[None] for key, value in each.items()}).loss for each in examples]
    if name == "causal language model":  # an example without labels has a loss of zero
        examples[1]["labels"], own[1] = torch.full_like(examples[1]["labels"], tt.IGNORED), torch.zeros(())
    batch = {key: torch.stack([each[key] for each in examples]) for key in examples[0]}
    off = {} if name in MORE else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(losses_for(model)(model, batch), torch.stack(own), **off)


def test_log_rows_have_epsilon_and_nothing_private(tmp_path):
    subject = tt.trainer(tmp_path, privacy=PrivacyArguments(noise_multiplier=2.0, target_delta=1e-2), max_steps=2)
    output = subject.train()
    epsilon = [row["epsilon"] for row in subject.state.log_history]
    assert epsilon == sorted(epsilon)
    assert 0 < epsilon[0] < epsilon[-1] == subject.engine.epsilon()
    private = {"loss", "train_loss", "grad_norm", "total_flos", "private_loss"}
    assert not any(private & set(row) for row in [*subject.state.log_history, output.metrics])
    assert math.isnan(output.training_loss)
    assert subject.state.total_flos == 0


def test_a_private_loss_is_logged_on_request_only(tmp_path):
    model, examples = tt.gpt2(), tt.data()
    batch = {key: torch.stack([each[key] for each in examples]) for key in examples[0]}
    with torch.no_grad():
        mean = float(losses_for(model)(model, batch).mean())
    subject = tt.trainer(tmp_path, model, examples, tt.repeatable(log_private_loss=True), max_steps=1)
    output = subject.train()
    assert subject.state.log_history[0]["private_loss"] == pytest.approx(mean, rel=1e-5)
    assert output.training_loss == pytest.approx(mean, rel=1e-5)
    assert output.metrics["private_train_loss"] == pytest.approx(mean, rel=1e-5)


class Sizes(transformers.TrainerCallback):
    def __init__(self, subject):
        self.subject, self.sizes = subject, []
        subject.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        self.sizes.append(self.subject.engine._steps.release.batch.sizes)


def test_the_logical_batch_is_that_of_a_device_times_accumulation(tmp_path):
    subject = tt.trainer(tmp_path, examples=tt.data(count=40), max_steps=-1, num_train_epochs=1.5)
    seen = Sizes(subject)
    subject.train()
    assert subject.engine.batch_size == 6
    assert subject.state.global_step == subject.engine.steps_taken == math.ceil(1.5 * round(40 / 6))
    assert all(size <= 2 for each in seen.sizes for size in each)
    assert len({sum(each) for each in seen.sizes}) > 1
    assert subject.state.epoch == pytest.approx(11 / 7)


def test_training_twice_adds_up(tmp_path):
    subject = tt.trainer(tmp_path, privacy=PrivacyArguments(noise_multiplier=5.0, self_check=False))
    subject.train()
    subject.train()
    assert sum(event.count for event in subject.engine.events) == 6
    assert tt.charged(tmp_path / "_privacy.ledger") == 6


@pytest.mark.slow
def test_training_ends_when_the_budget_does(tmp_path, caplog):
    privacy = PrivacyArguments(noise_multiplier=1.0, target_delta=1e-2, max_epsilon=10.0, self_check=False)
    subject = tt.trainer(tmp_path, privacy=privacy, max_steps=60, logging_strategy="no")
    subject.train()
    assert 0 < subject.state.global_step < 60
    assert subject.engine.epsilon() <= 10 < subject.engine.forecast(1)
    assert "training ends after step" in caplog.text


def test_max_grad_norm_is_overridden_with_a_log_line(tmp_path, caplog):
    assert tt.trainer(tmp_path, max_grad_norm=0.7).args.max_grad_norm == 0
    assert "max_grad_norm=0.7 of TrainingArguments is overridden" in caplog.text


def test_the_model_card_states_the_guarantee(tmp_path):
    privacy = PrivacyArguments(noise_multiplier=2.0, target_delta=1e-2, clipping=0.25, log_private_loss=True)
    subject = tt.trainer(tmp_path, privacy=privacy)
    subject.train()
    subject.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert subject.engine.guarantee() in card
    assert "Flat(max_norm=0.25)" in card
    found = huggingface_hub.ModelCard(card).data
    assert found["differential_privacy"]["epsilon"] == subject.engine.epsilon()
    assert {"generated_from_trainer", "differential-privacy"} <= set(found.tags)
    assert "private_loss" not in card


def test_a_saved_model_is_a_plain_one(tmp_path):
    subject = tt.trainer(tmp_path)
    subject.train()
    subject.save_model(str(tmp_path / "saved"))
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    ids = tt.tokens()[None]
    assert type(plain.transformer.ln_f) is torch.nn.LayerNorm
    with torch.no_grad():
        assert torch.equal(plain.eval()(ids).logits, subject.model.eval()(ids).logits)
    assert subject.model.generate(ids, max_new_tokens=3, do_sample=False).tolist() == (
        plain.generate(ids, max_new_tokens=3, do_sample=False).tolist()
    )
