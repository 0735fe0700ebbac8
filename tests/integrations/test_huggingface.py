"""PrivateTrainer: clipped gradients against a loop over single examples, losses, logs, options, refusals, two ranks."""

import math
from functools import partial

import oracle
import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")
accelerate = pytest.importorskip("accelerate")

import tiny_trainers as tt  # noqa: E402
from ranks import on_ranks, told  # noqa: E402

from ghostclip.errors import PrivacyError, UnsupportedModelError  # noqa: E402
from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer  # noqa: E402
from ghostclip.integrations.huggingface_losses import class_losses, losses_for  # noqa: E402

pytestmark = pytest.mark.usefixtures("coarse_losses")

CLIPPING = 0.25


def bert_of(labels, kind):
    """A classifier by numbers or by several labels at a time, and such an example."""
    build = partial(tt.bert, "SequenceClassification", num_labels=labels, problem_type=kind)
    return build, lambda: {"input_ids": tt.tokens(), "labels": torch.rand(labels, dtype=torch.float64).round()}


TASKS = tt.TASKS | {
    "a number": bert_of(1, None), "numbers": bert_of(3, "regression"),
    "labels": bert_of(3, "multi_label_classification"),
}  # fmt: skip


def stacked(examples):
    return {name: torch.stack([each[name] for each in examples]) for name in examples[0]}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.one_in(3)
def test_a_step_is_the_clipped_sum_of_a_loop_over_examples(name, tmp_path):
    """Of the model's own losses, where next tokens' are in the type of the logits, which transformers' rounds."""
    build, example = TASKS[name]
    model, examples = build().double(), tt.data(example)
    if name == "causal language model":  # an example without labels has a loss of zero
        examples[1]["labels"] = torch.full_like(examples[1]["labels"], tt.IGNORED)
    losses = []
    for each in examples:
        outputs = model(**stacked([each]))
        losses.append(outputs.loss)
        if name == "causal language model":
            labels = each["labels"][1:]
            summed = nn.functional.cross_entropy(outputs.logits[0, :-1], labels, reduction="sum")
            losses[-1] = summed / max(1, int((labels != tt.IGNORED).sum()))
    found = losses_for(model)(model, stacked(examples))
    torch.testing.assert_close(found, torch.stack(losses).double(), rtol=1e-5, atol=1e-5)
    grads = oracle.grads_of_single_losses(model, torch.stack(losses))
    assert oracle.norms(grads).max() > CLIPPING
    before = [parameter.detach().clone() for parameter in model.parameters()]
    privacy = PrivacyArguments(noise_multiplier=0.0, clipping=CLIPPING)
    tt.trainer(tmp_path, model, examples, privacy, max_steps=1).train()
    rounded = name in ("sequence to sequence", "speech recognition")
    exact = {"rtol": 1e-4, "atol": 1e-6} if rounded else {"rtol": 1e-5, "atol": 1e-11}
    for was, now, total in zip(before, model.parameters(), oracle.clipped_sum(grads, CLIPPING).values(), strict=True):
        # The weights are clipped with a margin for rounding, of some 1e-6.
        torch.testing.assert_close((was - now.detach()) / 0.5, total / len(examples), **exact)


DECODER = {
    "vocab_size": tt.WORDS, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 16,
    "pad_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 3, "dropout": 0.0,
}  # fmt: skip
SPEECH = {
    "audio_config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12},
    "text_config": {
        "model_type": "llama", "vocab_size": tt.WORDS, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    "audio_token_id": 0,
}  # fmt: skip
# By class: of its configuration the name and sizes. The first two take labels that were shifted before.
PARTICULAR = {
    "BartForCausalLM": ("BartConfig", DECODER), "TrOCRForCausalLM": ("TrOCRConfig", DECODER),
    "M2M100ForConditionalGeneration": ("M2M100Config", DECODER),
    "BlenderbotForConditionalGeneration": ("BlenderbotConfig", DECODER),
    "VoxtralForConditionalGeneration": ("VoxtralConfig", SPEECH),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTICULAR)
def test_labels_stand_where_the_model_has_them(name):
    config, sizes = PARTICULAR[name]
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()
    inputs = stacked([tt.text() for _ in range(3)])
    alone = [model(**{name: each[row : row + 1] for name, each in inputs.items()}).loss for row in range(3)]
    torch.testing.assert_close(losses_for(model)(model, inputs), torch.stack(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_padding_on_the_left_changes_no_loss(frozen):
    """A text's first token, which nothing of its own is before, has no loss; its padding would predict it."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=tt.WORDS, **sizes)).double()
    model.lm_head.requires_grad_(not frozen)
    texts = [tt.tokens()[:length] for length in (3, 7, 5)]

    def padded(ids):
        columns = {"input_ids": (ids, 0), "attention_mask": (torch.ones_like(ids), 0), "labels": (ids, tt.IGNORED)}
        return {name: nn.functional.pad(x, (7 - len(x), 0), value=fill) for name, (x, fill) in columns.items()}

    losses = losses_for(model)(model, stacked([padded(ids) for ids in texts]))
    alone = [model(input_ids=ids[None], labels=ids[None]).loss for ids in texts]
    torch.testing.assert_close(losses, torch.stack(alone).double(), rtol=1e-5, atol=1e-6)


def test_an_answer_that_ends_beyond_the_text_has_a_loss_for_its_first_token():
    model = tt.bert("QuestionAnswering", num_labels=2).eval()
    inputs = stacked([tt.question() | {"end_positions": torch.tensor(tt.LENGTH + 2)}])
    logits = model(inputs["input_ids"]).start_logits
    expected = nn.functional.cross_entropy(logits, inputs["start_positions"], reduction="none") / 2
    torch.testing.assert_close(losses_for(model)(model, inputs), expected)


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
    with torch.no_grad():
        mean = float(losses_for(model)(model, stacked(examples)).mean())
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
    assert subject.engine.batch_size == subject.callback_handler.train_dataloader.batch_size == 6
    assert subject.state.global_step == subject.engine.steps_taken == math.ceil(1.5 * round(40 / 6))
    assert all(size <= 2 for each in seen.sizes for size in each)
    assert len({sum(each) for each in seen.sizes}) > 1
    assert subject.state.epoch == pytest.approx(11 / 7)


def test_training_twice_adds_up(tmp_path):
    privacy = PrivacyArguments(noise_multiplier=5.0, self_check=False)
    subject = tt.trainer(tmp_path, privacy=privacy, logging_strategy="no")
    subject.train()
    subject.train()
    assert sum(event.count for event in subject.engine.events) == 6
    assert tt.charged(tmp_path / "_privacy.ledger") == 6


def test_max_grad_norm_is_overridden_with_a_log_line(tmp_path, caplog):
    assert tt.trainer(tmp_path, max_grad_norm=0.7).args.max_grad_norm == 0
    assert "max_grad_norm=0.7 of TrainingArguments is overridden" in caplog.text


def test_the_model_card_states_the_guarantee(tmp_path):
    privacy = PrivacyArguments(
        noise_multiplier=2.0, target_delta=1e-2, clipping=0.25, log_private_loss=True, self_check=False
    )
    subject = tt.trainer(tmp_path, privacy=privacy, max_steps=1)
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


def trainer_with(folder, kind=PrivateTrainer, **options):
    """A trainer of a class, with options set afterwards: TrainingArguments may not take them on this machine."""
    args = tt.arguments(folder)
    for name, value in options.items():
        setattr(args, name, value)
    return kind(model=tt.gpt2(), args=args, train_dataset=tt.data(), privacy=tt.repeatable())


def own(name):
    return type("OwnTrainer", (PrivateTrainer,), {name: lambda self, *args, **options: None})


class Own(transformers.BertForSequenceClassification):
    """A loss of its own in its forward."""

    def forward(self, input_ids, labels=None):
        outputs = super().forward(input_ids)
        outputs["loss"] = outputs.logits.square().mean()
        return outputs


class OwnFunction(transformers.BertForTokenClassification):
    loss_function = property(lambda self: nn.functional.mse_loss)


def changed(name):
    """A classifier whose loss or forward was changed after it was built."""
    model = tt.bert("SequenceClassification")
    setattr(model, name, lambda **_: None)
    return model


# Tiny models whose loss is another than that of their task.
UNLIKE = {
    "ProphetNetForConditionalGeneration": {"num_encoder_layers": 1, "num_decoder_layers": 1},
    "BrosForTokenClassification": {"num_hidden_layers": 1, "num_attention_heads": 2},
}


def unlike(name):
    sizes = {"vocab_size": tt.WORDS, "hidden_size": 16, "intermediate_size": 12, "max_position_embeddings": 16}
    model = getattr(transformers, name)
    return model(model.config_class(**sizes, **UNLIKE[name]))


def adapted_ranks(folder):
    peft = pytest.importorskip("peft")
    config = peft.AdaLoraConfig(task_type="SEQ_CLS", total_step=3, target_modules=["query"])
    return tt.trainer(folder, peft.get_peft_model(tt.bert("SequenceClassification"), config))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(tt.data())


OPTIONS = {
    "train_sampling_strategy": "group_by_length", "auto_find_batch_size": True, "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0, "include_num_input_tokens_seen": "all", "use_liger_kernel": True,
    "optim": "schedule_free_adamw", "debug": "underflow_overflow", "skip_memory_metrics": False,
}  # fmt: skip
UNSET = {"fp16": True, "torch_compile_backend": "eager", "deepspeed": {}, "fsdp": "full_shard", "group_by_length": True}
# What is built from a folder, and words of the error.
REFUSED = [
    *((lambda folder, n=name: tt.trainer(folder, **{n: OPTIONS[n]}), f"{name}=.* of TrainingArguments|optim=")
      for name in OPTIONS),
    *((lambda folder, n=name: trainer_with(folder, **{n: UNSET[n]}), f"{name}={value!r} of TrainingArguments")
      for name, value in UNSET.items()),
    *((lambda folder, n=name: trainer_with(folder, own(n)), f"OwnTrainer.{name} would take the place")
      for name in ("get_train_dataloader", "_get_train_sampler", "training_step")),
    (lambda folder: trainer_with(folder, push_to_hub=True, hub_strategy="all_checkpoints"), "would publish check"),
    (lambda folder: tt.trainer(folder, examples=Stream()), "can't be read at random"),
    (lambda folder: trainer_with(folder, own("compute_loss")), "compute_losses"),
    (lambda folder: tt.trainer(folder, more={"compute_loss_func": lambda *_, **__: None}), "compute_losses"),
    (lambda folder: tt.trainer(folder, tt.bert("NextSentencePrediction")), r"NextSentencePrediction.*compute_losses"),
    (lambda folder: tt.trainer(folder, Own(tt.bert("MaskedLM").config)), "Own has a forward of its .*: class_losses"),
    (lambda folder: tt.trainer(folder, OwnFunction(tt.bert("MaskedLM").config)), "OwnFunction has a loss_function"),
    *((lambda folder, n=name: tt.trainer(folder, changed(n)), f"has a {name} of its own .*compute_losses=")
      for name in ("loss_function", "forward")),
    *((lambda folder, n=name: tt.trainer(folder, unlike(n)), f"isn't known for {name}.*compute_losses")
      for name in UNLIKE),
    (lambda folder: trainer_with(folder, predict_with_generate=True), r"class Translation\(PrivateTrainer, Seq2SeqTr"),
    (adapted_ranks, r"AdaLoRA chooses ranks .* use LoraConfig"),
    (lambda folder: tt.trainer(folder).hyperparameter_search(n_trials=2), "spends privacy"),
    (lambda folder: tt.trainer(folder, compute_losses=3), "compute_losses must be a function .* got 3"),
    (lambda folder: tt.trainer(folder).task_losses(None, {"y": 0}), r"no entry named labels \(label_names .* only y;"),
    (lambda folder: trainer_with(folder, gradient_checkpointing_kwargs={"use_reentrant": True}),
     r"^activation_checkpointing_kwargs \(gradient_checkpointing_kwargs in .*: use_reentrant=True hides"),
    (lambda folder: trainer_with(folder, gradient_checkpointing_kwargs={"preserve_rng_state": False}),
     r"^activation_checkpointing_kwargs \(.*: with preserve_rng_state=False dropout is another"),
    (lambda folder: tt.trainer(folder, privacy=tt.repeatable(unit_ids=[1] * tt.EXAMPLES)).train(),
     r"has 6 rows, .* at most 2; raise per_device_train_batch_size, or .*: max_rows_per_unit="),
]  # fmt: skip


@pytest.mark.parametrize(("build", "words"), REFUSED)
@pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
def test_what_is_not_private_is_refused(build, words, tmp_path):
    with pytest.raises((PrivacyError, UnsupportedModelError, TypeError, ValueError), match=words):
        build(tmp_path)


CHECKPOINTING = max(
    ("activation_checkpointing", "gradient_checkpointing"), key=partial(hasattr, transformers.TrainingArguments)
)


@pytest.mark.parametrize(("option", "least", "most"), [(CHECKPOINTING, 0.0, 1e-6), ("bf16", 1e-12, 0.02)])
def test_options_that_change_next_to_nothing(option, least, most, tmp_path):
    found = []
    for value in (True, False):
        torch.manual_seed(2)
        subject = tt.trainer(tmp_path / str(value), tt.gpt2(), tt.data(), **{option: value})
        subject.train()
        found.append([parameter.detach() for parameter in subject.model.parameters()])
    assert all(parameter.dtype == torch.float32 for parameter in found[0])
    assert least <= max(float((one - other).abs().max()) for one, other in zip(*found, strict=True)) <= most


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(tt.bert("SequenceClassification"), config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    subject = tt.trainer(
        tmp_path, model, tt.data(tt.labelled_text), tt.repeatable(self_check=True), save_strategy="steps", save_steps=2
    )
    subject.train()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad
    subject.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    subject.train(str(tmp_path / "checkpoint-2"))
    assert subject.state.global_step == 3


def test_a_model_with_a_loss_of_its_own_trains_by_given_losses(tmp_path):
    given = {"model": Own(tt.bert("SequenceClassification").config), "examples": tt.data(tt.labelled_text)}
    subject = tt.trainer(tmp_path, **given, compute_losses=class_losses, max_steps=1)
    subject.train()
    assert subject.engine.steps_taken == 1


def test_the_self_check_compares_losses(tmp_path):
    def mixed(model, inputs):
        losses = nn.functional.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")
        return losses * (losses.detach() / losses.detach().mean())

    model, examples = nn.Linear(5, 3), [{"x": torch.randn(5), "labels": torch.tensor(row % 3)} for row in range(12)]
    whole = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, "remove_unused_columns": False}
    subject = tt.trainer(tmp_path, model, examples, PrivacyArguments(noise_multiplier=1.0), mixed, **whole)
    with pytest.raises(PrivacyError.__base__, match=r"other examples|depends"):
        subject.train()


def trained_by_rank(folder):
    """The weights of one of two processes, and the step that a resumed training of theirs ends at."""
    accelerate.state.AcceleratorState._reset_state(True)  # that of the process it was forked from
    assert told()
    torch.manual_seed(4)
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "ddp_backend": "gloo"}
    subject = tt.trainer(folder, tt.gpt2(), tt.data(count=24), **options)
    subject.train()
    assert (subject.engine.batch_size, subject.engine.steps_taken) == (12, 4)
    found = [parameter.detach().clone() for parameter in subject.model.parameters()]
    torch.distributed.barrier()
    subject.train(str(folder / "checkpoint-2"))
    return found, subject.state.global_step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_train_one_model(tmp_path):
    (these, step), (those, other) = on_ranks(lambda: trained_by_rank(tmp_path / "run"), tmp_path)
    assert all(torch.equal(this, that) for this, that in zip(these, those, strict=True))
    assert step == other == 4
    assert tt.charged(tmp_path / "run" / "_privacy.ledger") == 6


@pytest.mark.parametrize(
    ("name", "instead"),
    [("max_grad_norm", "clipping"), ("epsilon", "target_epsilon"), ("batch_size", "per_device_train_batch_size")],
)
def test_names_of_others_are_refused_with_ours(name, instead):
    with pytest.raises(TypeError, match=f"PrivacyArguments has no argument {name}; use {instead}"):
        PrivacyArguments(**{name: 1.0})
    with pytest.raises(TypeError, match=r"^(privacy|target_epsilon) must be"):
        PrivateTrainer(privacy=PrivacyArguments(target_epsilon="3") if name == "epsilon" else {name: 1.0})


@pytest.mark.parametrize("name", ["log_private_loss", "public_evaluation"])
def test_a_text_is_no_flag(name):
    with pytest.raises(TypeError, match=f"{name} must be True or False; got 'no'"):
        PrivateTrainer(privacy=PrivacyArguments(noise_multiplier=1.0, **{name: "no"}))


BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}
FOLLOWING = [
    ("load_best_model_at_end", BEST, False), ("metric_for_best_model='loss'", {"metric_for_best_model": "loss"}, False),
    (None, BEST, True), (None, {}, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "public"), FOLLOWING)
def test_training_that_follows_metrics_is_warned_of_unless_they_are_public(name, options, public, tmp_path, caplog):
    privacy = PrivacyArguments(noise_multiplier=1.0, public_evaluation=public)
    more = {"eval_dataset": tt.data()}
    subject = tt.trainer(tmp_path, privacy=privacy, more=more, eval_strategy="steps", eval_steps=1, **options)
    # Again where something else is added that follows them, and for nothing else.
    subject.add_callback(transformers.ProgressCallback())
    subject.add_callback(transformers.EarlyStoppingCallback())
    said = [message for message in caplog.messages if "training follows metrics of the evaluation data" in message]
    expected = [] if public else ["EarlyStoppingCallback"] if name is None else [name, "EarlyStoppingCallback"]
    assert [message.partition(":")[0] for message in said] == expected
    assert all("PrivacyArguments(public_evaluation=True)" in message for message in said)


ROWS = tt.data()
EVALUATED = [(ROWS, True), ({"held out": tt.data(), "train": ROWS}, True), (tt.data(), False), (None, False)]


@pytest.mark.parametrize(("evaluated", "warned"), EVALUATED)
def test_metrics_of_the_training_data_are_warned_of(evaluated, warned, tmp_path, caplog):
    tt.trainer(tmp_path, examples=ROWS, more={"eval_dataset": evaluated})
    assert ("eval_dataset is train_dataset: epsilon doesn't count its metrics" in caplog.text) == warned


def test_a_user_s_first_rows_are_used_where_they_are_capped(tmp_path):
    users = [row // 3 for row in range(tt.EXAMPLES)]
    private = tt.repeatable(unit_ids=users, max_rows_per_unit=1)
    subject = tt.trainer(tmp_path, privacy=private, max_steps=1, gradient_accumulation_steps=1)
    seen = Sizes(subject)
    subject.train()
    assert seen.sizes == [[2]]


def test_unit_ids_are_values_or_a_column(tmp_path):
    users = [row // 2 for row in range(len(tt.data()))]
    subject = tt.trainer(tmp_path, privacy=tt.repeatable(unit_ids=users), max_steps=1, gradient_accumulation_steps=1)
    subject.train()
    assert "one user" in subject.engine.guarantee()
    assert subject.engine.sample_rate == pytest.approx(subject.batch_size / len(set(users)))
    with pytest.raises(ValueError, match="must be a column of train_dataset; it has no columns"):
        tt.trainer(tmp_path / "other", privacy=tt.repeatable(unit_ids="author")).train()


def test_a_column_of_users_that_a_transform_leaves_out_is_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    examples = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 6, "author": [*"aabbcc"]})
    examples.set_transform(lambda rows: {"input_ids": torch.tensor(rows["input_ids"])})
    with pytest.raises(ValueError, match=r"the column 'author' of train_dataset, .* transform or format leaves it out"):
        tt.trainer(tmp_path, examples=examples, privacy=tt.repeatable(unit_ids="author")).train()


def test_accumulation_that_is_changed_afterwards_is_refused(tmp_path):
    made = tt.trainer(tmp_path)
    made.args.gradient_accumulation_steps = 4
    with pytest.raises(PrivacyError, match="gradient_accumulation_steps was changed"):
        made.train()


def test_float16_of_accelerate_s_own_configuration_is_refused(tmp_path, monkeypatch):
    built = accelerate.Accelerator
    monkeypatch.setattr(built, "mixed_precision", "fp16")
    with pytest.raises(PrivacyError, match="configured for float16, which needs a loss scale"):
        tt.trainer(tmp_path)
