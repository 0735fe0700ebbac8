"""Padding to the longest text: classifiers of transformers with a mask train on, and every way to train is checked."""

import collated
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from experiments.zoo.language import ENCODERS, GPT2, POSITIONS_FIRST, from_config
from experiments.zoo.subject import CLASSES, TOKENS
from ghostclip import PrivacyEngine, UnsupportedModelError, wrap

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the DataLoader's SequentialSampler is replaced"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

# They see the padding though they are given a mask: by a Fourier transform, and by positions counted from the end.
SEE_PADDING = {"FNet", "XLNet"}


def texts(count=64):
    """Token ids of 4 to 9 tokens, with a class."""
    lengths = torch.randint(4, 10, (count,)).tolist()
    return [(torch.randint(4, TOKENS, (length,)), row % CLASSES) for row, length in enumerate(lengths)]


def padded(rows, side="right"):
    ids = pad_sequence([text for text, _ in rows], batch_first=True, padding_side=side)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([y for _, y in rows])}


def class_losses(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def engine_of(model, collate=padded):
    data = DataLoader(texts(), batch_size=16, collate_fn=collate)
    return PrivacyEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=16, noise_multiplier=1.0)


def epochs(engine, loss_fn, count=2):
    for _ in range(count):
        for batch in engine.batches():
            engine.step(batch, loss_fn)


def build(name):
    torch.manual_seed(0)
    _, model, config, options = ENCODERS[name]
    built = from_config(model, config, **{**options, "pad_token_id": 0})().train()
    return wrap(built, batch_dim=POSITIONS_FIRST.get(name, 0))


@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in SEE_PADDING])
@pytest.mark.one_in(4)
def test_a_classifier_with_a_mask_trains_on(name):
    epochs(engine := engine_of(build(name)), class_losses)
    assert engine.steps_taken == 8


@pytest.mark.parametrize("name", sorted(SEE_PADDING))
def test_a_classifier_that_sees_the_padding_is_refused(name):
    with pytest.raises(UnsupportedModelError, match="padding to the longest text"):
        epochs(engine_of(build(name)), class_losses)


def gpt2_losses(model, batch):
    """Of the last token, which is a text's own with padding on the left."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, -1]
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def test_gpt2_with_padding_on_the_left_is_refused():
    torch.manual_seed(0)
    model = from_config("GPT2LMHeadModel", "GPT2Config", **GPT2)()
    with pytest.raises(UnsupportedModelError, match="padding to the longest text"):
        epochs(engine_of(model, lambda rows: padded(rows, "left")), gpt2_losses)


def test_wav2vec2_with_group_normalization_is_refused():
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_stride=(3, 2), conv_kernel=(5, 3), num_feat_extract_layers=2, feat_extract_norm="group",
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=3, classifier_proj_size=8,
        apply_spec_augment=False, layerdrop=0.0, mask_time_prob=0.0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    sounds = [(torch.randn(int(length)), row % 3) for row, length in enumerate(torch.randint(100, 300, (48,)))]

    def collate(rows):
        waves = pad_sequence([wave for wave, _ in rows], batch_first=True)
        mask = pad_sequence([torch.ones(len(wave), dtype=torch.long) for wave, _ in rows], batch_first=True)
        return {"waves": waves, "mask": mask, "y": torch.tensor([y for _, y in rows])}

    def loss_fn(model, batch):
        logits = model(batch["waves"], attention_mask=batch["mask"]).logits
        return F.cross_entropy(logits, batch["y"], reduction="none")

    data = DataLoader(sounds, batch_size=16, collate_fn=collate)
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=16, noise_multiplier=1.0
    )
    with pytest.raises(UnsupportedModelError, match="padding to the longest text"):
        epochs(engine, loss_fn)


def trainer_of(folder, compute_losses=None):
    from ghostclip.integrations.huggingface import PrivacyArguments, PrivateTrainer

    torch.manual_seed(0)
    model = from_config("GPT2LMHeadModel", "GPT2Config", **GPT2)()
    data = [{"input_ids": text.tolist()} for text, _ in texts()]

    def collate(rows):
        ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
        return transformers.BatchEncoding(
            {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
        )

    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=16, max_steps=6, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, optim="sgd", remove_unused_columns=False,
    )  # fmt: skip
    privacy = PrivacyArguments(noise_multiplier=1.0)
    return PrivateTrainer(
        model, arguments, train_dataset=data, data_collator=collate, privacy=privacy, compute_losses=compute_losses
    )


def mean_over_the_padded_length(model, inputs):
    """What a mean over dimension 1 makes of token losses."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), inputs["labels"][:, 1:], reduction="none").mean(1)


def test_the_trainer_trains_with_own_losses_and_refuses_those_that_see_padding(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    assert trainer.engine.steps_taken == 6
    with pytest.raises(UnsupportedModelError, match="padding to the longest text"):
        trainer_of(tmp_path, mean_over_the_padded_length).train()


def fit(folder, masked):
    lightning = pytest.importorskip("lightning")
    from ghostclip.integrations.lightning import PrivacyCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(30, 6), nn.Linear(6, 3)

        def training_step(self, batch, batch_idx):
            hidden = self.emb(batch["ids"])
            pooled = collated.masked_mean(hidden, batch) if masked else hidden.mean(1)
            losses = F.cross_entropy(self.head(pooled), batch["y"], reduction="none")
            self.log("loss", losses.mean())
            return losses

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    callback = PrivacyCallback(noise_multiplier=1.0, target_delta=1e-5, clipping=1.0)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, callbacks=[callback], default_root_dir=folder, **quiet
    )
    trainer.fit(Module(), DataLoader(collated.texts(), batch_size=16, collate_fn=collated.padded, shuffle=True))
    return trainer.global_step


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:the DataLoader's RandomSampler is replaced")
def test_lightning_trains_with_own_losses_and_refuses_those_that_see_padding(tmp_path):
    assert fit(tmp_path, masked=True) == 8
    with pytest.raises(UnsupportedModelError, match="padding to the longest text"):
        fit(tmp_path, masked=False)


def test_accelerate_s_optimizer_and_model_are_checked_too():
    accelerate = pytest.importorskip("accelerate")
    model, data, loss_fn, _ = collated.MIXING["mean_pooling_without_a_mask"]()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine = PrivacyEngine(model, optimizer, data, batch_size=16, noise_multiplier=1.0)
    try:
        with pytest.raises(UnsupportedModelError, match="padding to the longest text"):
            epochs(engine, loss_fn)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
