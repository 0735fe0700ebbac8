"""The planted bugs: each replaces a piece of source text that is there exactly once, and names the tests to run."""

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes:
        name: what it is.
        file: where, from the root.
        source, replacement: text.
        tests: arguments of pytest.
    """

    name: str
    file: str
    source: str
    replacement: str
    tests: tuple[str, ...]


PITFALLS = ("tests/test_pitfalls.py",)
LINES = ("tests/test_check_lines.py",)
CLIPPER = ("tests/test_clipper.py",)
ROUNDING = ("tests/test_rounding.py",)
PASSES, FIRST = "ghostclip/clipper/second_pass.py", "ghostclip/clipper/first_pass.py"
WHOLE, STEP = "ghostclip/norms/reduce.py", "ghostclip/engine/step.py"
RELEASE = "ghostclip/engine/release.py"
UPDATE_CHECK = "ghostclip/engine/update_check.py"
UPDATES, TAKEN_TURNS = ("tests/test_update_check.py",), ("tests/test_engine_turns.py",)
RELEASES = ("tests/test_engine_release.py",)
SUMS, NOISE, SPENDING = "ghostclip/engine/sums.py", "ghostclip/noise/standard.py", "ghostclip/engine/budget.py"
COMPARISON, COMPARED = "ghostclip/self_check/comparison.py", ("tests/test_comparison.py",)
MIXING_TEST, TRIAL = "ghostclip/self_check/mixing.py", "ghostclip/self_check/trial_losses.py"
LOADING, CUTTING = "ghostclip/self_check/loading.py", "ghostclip/clipper/cutting.py"
CHECKING, STATE = "ghostclip/self_check/checking.py", "ghostclip/self_check/model_state.py"
COLLATED, KEPT_STATE = ("tests/test_collated.py",), ("tests/test_kept_state.py",)
OVERLOOKED = ("tests/test_overlooked.py",)
JOURNAL, RECORDS = "ghostclip/ledger/journal.py", "ghostclip/ledger/records.py"
LEDGER = ("tests/test_ledger.py", "tests/test_ledger_damage.py")
CHECKPOINT = ("tests/test_engine_checkpoint.py", "tests/test_checkpoint_spending.py")

CLIPPING = [
    Mutant(
        "no clip",
        PASSES,
        "self.clipping.weights(self.scaled(bounds))",
        "torch.ones_like(norms)",
        CLIPPER,
    ),
    Mutant(
        "clip of the mean",
        PASSES,
        "self.clipping.weights(self.scaled(bounds))",
        "self.clipping.weights(norms.mean().expand_as(norms))",
        CLIPPER,
    ),
    Mutant(
        "square of the norm",
        "ghostclip/clipper/collector.py",
        "        found = norms(squared, self._dtype)\n",
        "        found = norms(squared, self._dtype) ** 2\n",
        CLIPPER,
    ),
    Mutant(
        "bias omitted from the norm",
        "ghostclip/nn/linear.py",
        "            return summed_positions(grad)\n",
        "            return summed_positions(grad * 0)\n",
        ("tests/test_layers.py", "-k", "linear_3"),
    ),
    Mutant(
        "bias not summed over positions",
        "ghostclip/nn/linear.py",
        "to_float32(grad).sum(1))",
        "to_float32(grad)[:, 0])",
        ("tests/test_layers.py", "-k", "linear_3"),
    ),
    Mutant(
        "a convolution's sum leaves the weights out",
        "ghostclip/norms/convolution.py",
        "        scale = weights.to(grads.dtype).view(-1, *[1] * (grads.dim() - 1))\n",
        "        scale = torch.ones_like(weights).to(grads.dtype).view(-1, *[1] * (grads.dim() - 1))\n",
        ("tests/test_norms_convolution.py",),
    ),
    Mutant(
        "rows of an example in one image meet in a patch",
        "ghostclip/norms/convolution.py",
        "        places = max(-(-(images.shape[3] + above) // step), grads.shape[3])\n",
        "        places = max(-(-images.shape[3] // step), grads.shape[3])\n",
        ("tests/test_norms_convolution.py",),
    ),
    Mutant(
        "duplicates not summed",
        "ghostclip/norms/rows.py",
        "    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]\n",
        "",
        ("tests/test_norms_rows.py",),
    ),
    Mutant(
        "a cross term of tied uses that cancels by itself is trusted",
        "ghostclip/norms/combine.py",
        "CANCELLING_USES * apart + sizes\n",
        "CANCELLING_USES * apart\n",
        ("tests/test_rounding.py", "-k", "tied"),
    ),
    Mutant(
        "tied cross term dropped",
        "ghostclip/norms/combine.py",
        "squared, scale = apart + 2 * products, ",
        "squared, scale = apart, ",
        ("tests/test_layers.py", "-k", "tied_head"),
    ),
    Mutant(
        "second use of a layer forgotten",
        "ghostclip/norms/combine.py",
        "    terms = [_as_positions(term) for term in terms]\n",
        "    return terms[0]\n",
        ("tests/test_layers.py", "-k", "same_layer"),
    ),
    Mutant(
        "time taken for the batch",
        "ghostclip/nn/linear.py",
        "tensor = tensor.movedim(batch_dim, 0) if batch_dim else tensor",
        "tensor = tensor",
        ("tests/test_layers.py", "-k", "time_first and (encoder or attention_self)"),
    ),
    Mutant(
        "mean-loss factor",
        PASSES,
        "            return dict.fromkeys(self._parameters, weights)\n",
        "            return dict.fromkeys(self._parameters, weights / len(weights))\n",
        ("tests/test_layers.py", "-k", "encoder_layer"),
    ),
    Mutant("[B, 1] losses broadcast", FIRST, "    if losses.dim() != 1:\n", "    if losses.dim() > 2:\n", PITFALLS),
    Mutant(
        "stale norm of a repeated layer",
        "ghostclip/clipper/collector.py",
        "            and all(self._left[part] == 1 for part",
        "            and all(self._left[part] < 9 for part",
        ("tests/test_layers.py", "-k", "same_layer or one_module"),
    ),
    Mutant(
        "NaN weight",
        PASSES,
        "tree_map(lambda each: torch.where(finite, each, torch.zeros_like(each)), weights)",
        "weights",
        ("tests/test_nonfinite.py",),
    ),
    Mutant(
        "bad example touches the sum",
        "ghostclip/norms/term.py",
        "return self.replaced(lambda tensor: zero_examples(tensor, keep))",
        "return self",
        ("tests/test_nonfinite.py",),
    ),
    Mutant(
        "a kept NaN spoils the others",
        "ghostclip/graph/shared/boundary.py",
        "        tensor.masked_fill_(~tensor.isfinite(), value)\n",
        "        pass\n",
        PITFALLS,
    ),
    Mutant(
        "0 * inf counts as 0 where a parameter meets the examples",
        "ghostclip/graph/shared/boundary.py",
        " and not self._reads(wrong, entries, grad, places)",
        "",
        ("tests/test_nonfinite_shared.py",),
    ),
    Mutant("no margin below the bound", WHOLE, "1.0 - 8.0 * torch", "1.0 + 3e5 * torch", CLIPPER),
    Mutant(
        "rounding margin left out of the weights",
        PASSES,
        "self.clipping.weights(self.scaled(bounds))",
        "self.clipping.weights(norms)",
        ROUNDING,
    ),
    Mutant(
        "rounding margin left out of groups",
        "ghostclip/clipper/collector.py",
        "both = {group: self._bounded(own)",
        "both = {group: (self._root([each[1] for each in own]),) * 2",
        ROUNDING,
    ),
    Mutant(
        "rounding margin left out where another term is kept",
        "ghostclip/planner.py",
        "        if answer.kept is None and answer.absolute is None:\n",
        "        if not keep and answer.absolute is None:\n",
        ROUNDING,
    ),
    Mutant(
        "tied uses that cancel taken as they are",
        "ghostclip/norms/combine.py",
        "CANCELLING_USES * apart + sizes",
        "0.0 * apart",
        ROUNDING,
    ),
    Mutant(
        "a second backward from weighted losses",
        PASSES,
        "                    sink = Reweighting(run.layout, done, sums, add, run.seen, marks)\n",
        "                    sums = WeightedSums(self._by_owner(weights / weights, self.scale), finite)\n"
        "                    sink, marks = Reweighting(run.layout, done, sums, add), weights\n",
        (*ROUNDING, "-k", "branches"),
    ),
    Mutant(
        "a second backward that ends at the first layer it is needed for",
        "ghostclip/graph/reader.py",
        "            call.ends = not reaches\n",
        "            call.ends = True\n",
        ("tests/test_reweighting.py",),
    ),
    Mutant(
        "rows of an example that is not finite in a sum by rules",
        "ghostclip/clipper/second_pass.py",
        "        term = term if self.finite is None else term.keep_only(self.finite)\n",
        "",
        ("tests/test_nonfinite.py", "tests/test_kept_grads.py"),
    ),
    Mutant(
        "a hook of a parameter that runs on no sum",
        "ghostclip/clipper/gradients.py",
        "    if have_hooks([p for _, p in passes.index.trained()]) or (is_distributed() and not sharded):\n",
        "    if False:\n",
        ("tests/test_kept_grads.py",),
    ),
    Mutant(
        "a hook of a parameter changes sums that get noise",
        SUMS,
        "        if have_hooks(parameter for _, parameter in trained):\n",
        "        if False:\n",
        ("tests/test_engine_arguments.py", "-k", "hook_on_a_parameter"),
    ),
    Mutant(
        "rounding to narrow gradients left out of the sensitivity",
        "ghostclip/clipper/gradient_guard.py",
        "self.excess = self._backwards * self._examples * max(",
        "self.excess = 4.0 * max(",
        ("tests/test_sensitivity.py", "-k", "narrow"),
    ),
    Mutant(
        "sums rounded to bfloat16",
        PASSES,
        "        amount = amount.to(torch.promote_types(parameter.dtype, torch.float32))\n",
        "        amount = amount.to(parameter.dtype)\n",
        PITFALLS,
    ),
    Mutant(
        "norms in autocast's precision",
        FIRST,
        "    return torch.autocast(kind, enabled=False) if",
        "    return nullcontext() if",
        PITFALLS,
    ),
    Mutant(
        "cancellation not tested for",
        "ghostclip/norms/outer.py",
        "    return ~(squared < CANCELLATION[squared.dtype] * scale)\n",
        "    return ~(squared < 0.0 * scale)\n",
        ("tests/test_clipper_guards.py",),
    ),
    Mutant(
        "norms that are to be exact may cancel",
        "ghostclip/planner.py",
        "if exact else self._answer",
        "if False else self._answer",
        ("tests/test_host_sync.py",),
    ),
    Mutant(
        "a norm that needed a look taken for one that isn't finite",
        PASSES,
        "if finite is not None and not may_sync(losses.device):",
        "if False:",
        ("tests/test_host_sync.py",),
    ),
    Mutant(
        "groups each with the whole bound",
        "ghostclip/clipping/groups.py",
        "dict.fromkeys(groups, self.max_norm / math.sqrt(max(1, len(groups))))",
        "dict.fromkeys(groups, self.max_norm)",
        ("tests/test_groupwise.py",),
    ),
    Mutant(
        "custom weights not clamped",
        "ghostclip/clipping/policies.py",
        "    return torch.minimum(torch.maximum(found, -bound), bound)\n",
        "    return found\n",
        ("tests/test_clipping.py",),
    ),
    Mutant(
        "the self-check compares nothing",
        "ghostclip/self_check/agreement.py",
        "    _refuse(errors, ",
        "    (errors, ",
        ("tests/test_self_check.py",),
    ),
    Mutant(
        "the self-check loads no halves",
        MIXING_TEST,
        "        return self._differ(self._trial.differ, self._trial.first.losses, found, in_order)\n",
        "        return False\n",
        (*COMPARED, "-k", "mix_are and large"),
    ),
]

ENGINE = [
    Mutant(
        "sigma without C",
        RELEASE,
        "std, batch_size = self.terms.noise_multiplier * self.sensitivity, self.terms.batch_size\n",
        "std, batch_size = self.terms.noise_multiplier, self.terms.batch_size\n",
        PITFALLS,
    ),
    Mutant(
        "noise twice",
        RELEASE,
        "return self._ranks.released(self._noise, every, std, batch_size, parameters)",
        "return self._noise.release(self._ranks.released(self._noise, every, std, batch_size, parameters), std / "
        "batch_size)",
        PITFALLS,
    ),
    Mutant(
        "noise never",
        RELEASE,
        "self._ranks.released(self._noise, every, std, batch_size, parameters)",
        "self._ranks.released(self._noise, every, 0.0, batch_size, parameters)",
        PITFALLS,
    ),
    Mutant(
        "realised denominator",
        RELEASE,
        "        self._end()\n        self.clipper.layout.reshard()\n",
        "        size = max(1, sum(self.current('').sizes))\n"
        "        self.terms = __import__('dataclasses').replace(self.terms, batch_size=size)\n"
        "        self._end()\n        self.clipper.layout.reshard()\n",
        PITFALLS,
    ),
    Mutant(
        "noise for the narrowest sensitivity",
        STEP,
        "self.release.sensitivity = max(self.release.sensitivity, result.sensitivity)",
        "self.release.sensitivity = min(1.0, result.sensitivity)",
        PITFALLS,
    ),
    Mutant(
        "unused parameters without noise",
        SUMS,
        "if parameter.requires_grad]",
        "if id(parameter) in self._totals]",
        PITFALLS,
    ),
    Mutant(
        "an interrupted batch is kept",
        "ghostclip/sampling/logical.py",
        "                self._owner.left(self)\n",
        "                pass\n",
        PITFALLS,
    ),
    Mutant(
        "a foreign gradient passes",
        SUMS,
        "        if not self.count and not self._totals:\n",
        "        if False:\n",
        ("tests/test_engine_guards.py",),
    ),
    Mutant(
        "a step before all physical batches",
        RELEASE,
        "        if gathered + missing != len(batch.sizes):\n",
        "        if gathered + missing > len(batch.sizes):\n",
        PITFALLS,
    ),
    Mutant(
        "charged after the release",
        RELEASE,
        "            self.spend()\n            self.put_in_place(held, self._make_private)\n",
        "            self.put_in_place(held, self._make_private)\n            self.spend()\n",
        (
            "tests/test_faults.py",
            "tests/test_engine_ledger.py",
            "tests/test_engine.py",
            "-k",
            "charge or budget or ledger or release",
        ),
    ),
    Mutant(
        "the same numbers every time",
        NOISE,
        "self._streams[device] = normal_on(device, self._seed)",
        "self._streams[device] = normal_on(device, 1)",
        PITFALLS,
    ),
    Mutant(
        "the same noise after a fork", NOISE, "if self.private and self._process != os.getpid():", "if False:", PITFALLS
    ),
    Mutant(
        "the same noise in every step",
        "ghostclip/noise/gaussian.py",
        "        self.position += blocks\n",
        "",
        ("tests/test_noise.py",),
    ),
    Mutant(
        "noise on half of the circle",
        "ghostclip/native/normal.c",
        "    bits ^= word << 31;\n",
        "",
        ("tests/test_noise.py",),
    ),
    Mutant(
        "hardened noise off its lattice",
        "ghostclip/noise/hardened.py",
        "torch.from_numpy(found).to(",
        "torch.from_numpy(found * 1.0000001).to(",
        ("tests/test_noise_lattice.py",),
    ),
    Mutant(
        "shuffle instead of Poisson",
        "ghostclip/sampling/schemes.py",
        "        return int(generator.binomial(self.population, self.sample_rate))\n",
        "        return self.batch_size\n",
        PITFALLS,
    ),
    Mutant(
        "empty batches skipped",
        "ghostclip/sampling/schemes.py",
        "        return int(generator.binomial(self.population, self.sample_rate))\n",
        "        return max(1, int(generator.binomial(self.population, self.sample_rate)))\n",
        ("tests/test_sampling.py",),
    ),
    Mutant(
        "sampling from numpy's global state",
        "ghostclip/noise/standard.py",
        "        return np.random.default_rng()\n",
        "        return np.random.default_rng(np.random.randint(2**31))\n",
        PITFALLS,
    ),
    Mutant(
        "any sampler is replaced",
        "ghostclip/sampling/loading.py",
        "        if found not in accepted:\n",
        "        if False:\n",
        PITFALLS,
    ),
    Mutant(
        "adaptive clipping not charged",
        "ghostclip/engine/adaptation.py",
        "JointGaussian(",
        "(lambda *parts, **_: parts[0])(",
        PITFALLS,
    ),
    Mutant(
        "counts of many groups charged as one",
        "ghostclip/engine/adaptation.py",
        "    counts = scheme.event(2 * std / math.sqrt(policy.counted) if noise_multiplier else 0.0)\n",
        "    counts = scheme.event(2 * std if noise_multiplier else 0.0)\n",
        ("tests/test_composed.py",),
    ),
    Mutant(
        "a scaling of the user's own is not held to the threshold",
        "ghostclip/clipping/composed.py",
        "            found = torch.minimum(torch.maximum(weights, -most), most)\n",
        "            found = weights\n",
        ("tests/test_composed.py",),
    ),
    Mutant(
        "thresholds are read anew for the sensitivity",
        "ghostclip/clipping/composed.py",
        "        return dict(self._thresholds)\n",
        "        return self.rule.thresholds(dict(self._sizes))\n",
        ("tests/test_composed.py",),
    ),
    Mutant(
        "an allocation of the user's own is not held to the noise multiplier",
        "ghostclip/clipping/composed.py",
        "            if found < sigma * (1.0 - TOLERANCE):\n",
        "            if False:\n",
        ("tests/test_composed.py",),
    ),
    Mutant(
        "a stage's noise factor is not charged",
        "ghostclip/engine/terms.py",
        "            replace(step_event(scheme, self._policy, factor * noise_multiplier), count=count)\n",
        "            replace(step_event(scheme, self._policy, noise_multiplier), count=count)\n",
        ("tests/test_schedule.py",),
    ),
    Mutant(
        "batches of all stages are drawn at the first one's rate",
        "ghostclip/engine/terms.py",
        "        return self._schemes[self._schedule.at(step)[0]]\n",
        "        return self._schemes[0]\n",
        ("tests/test_schedule.py",),
    ),
    Mutant(
        "a stage's thresholds don't change its noise",
        "ghostclip/clipper/second_pass.py",
        "        return self.clipping.sensitivity * self.threshold_factor\n",
        "        return self.clipping.sensitivity\n",
        ("tests/test_schedule.py",),
    ),
    Mutant(
        "counts are compared with the thresholds of another stage",
        "ghostclip/engine/release.py",
        "            self._adaptation.saw(self.clipper.passes.scaled(result.norms))\n",
        "            self._adaptation.saw(result.norms)\n",
        ("tests/test_schedule.py",),
    ),
    Mutant(
        "steps of a stage that are taken again are refused",
        "ghostclip/engine/budget.py",
        "        within = all(count <= self._planned.get(once, 0) for once, count in _counted(spent).items())\n",
        "        within = all(once in self._planned for once in _counted(spent))\n",
        ("tests/test_schedule.py",),
    ),
    Mutant(
        "noise shares are not undone",
        "ghostclip/engine/release.py",
        "            private = [each * shares.get(p, 1.0) for p, each in zip(parameters, private, strict=True)]\n",
        "            private = list(private)\n",
        ("tests/test_composed.py",),
    ),
    Mutant(
        "any noise may be given",
        "ghostclip/clipping/allocation.py",
        "        if not math.isclose(found, sigma, rel_tol=TOLERANCE):\n",
        "        if False:\n",
        ("tests/test_composed.py", "tests/test_clipping_parts.py"),
    ),
    Mutant(
        "adaptive count without noise",
        "ghostclip/engine/adaptation.py",
        "            counts += (self._counts * scale).to(counts)\n",
        "            self._policy.update([float(self._counts) / self._batch_size + 0.5])\n",
        ("tests/test_adaptive.py",),
    ),
]

ACCOUNTING = [
    Mutant(
        "NaN sigma accepted",
        "ghostclip/validate.py",
        "lambda value: 0 <= value < math.inf",
        "lambda value: not value < 0",
        PITFALLS,
    ),
    Mutant(
        "seeded noise counted as private",
        "ghostclip/noise/standard.py",
        "self.private = seed is None",
        "self.private = True",
        PITFALLS,
    ),
    Mutant(
        "step lost from the count",
        SPENDING,
        "        self._own[terms.event] += 1\n",
        "        self._own[terms.event] += self.steps % 2 == 0\n",
        PITFALLS,
    ),
    Mutant(
        "restore takes the charges back",
        "ghostclip/engine/snapshots.py",
        "        self.spending.add(_spent_in(found))\n",
        "        self.spending._own.clear()\n        self.spending.add(_spent_in(found))\n",
        PITFALLS,
    ),
    Mutant(
        "reset on load",
        "ghostclip/engine/snapshots.py",
        "        self.spending.add(_spent_in(found))\n",
        "",
        CHECKPOINT,
    ),
    Mutant(
        "an older ledger beside a checkpoint",
        "ghostclip/engine/snapshots.py",
        "        if not ledger.contains(head):\n",
        "        if False:\n",
        ("tests/test_checkpoint_spending.py", "tests/test_faults.py"),
    ),
    Mutant(
        "step lost from the ledger",
        RECORDS,
        'self.totals[record["run"]][replace(event, count=1)] += event.count',
        'self.totals[record["run"]][replace(event, count=1)] += event.count - 1',
        LEDGER,
    ),
    Mutant(
        "intents not flushed", JOURNAL, "            files.flush(self.path, self._file)\n", "            pass\n", LEDGER
    ),
    Mutant("taken before it is written", JOURNAL, "        block.left -= 1\n", "        block.left -= 0\n", LEDGER),
    Mutant(
        "torn tail forgotten",
        JOURNAL,
        "        if contents.rest:\n            files.write(self.path, self._file, contents.rest)\n"
        "        elif contents.torn:",
        "        if contents.torn:",
        LEDGER,
    ),
    Mutant(
        "hash chain not checked",
        RECORDS,
        "hashlib.sha256(before.encode() + body)",
        "hashlib.sha256(body)",
        ("tests/test_pitfalls.py",),
    ),
    Mutant(
        "the budget is not asked",
        SPENDING,
        "        if own >= self._limit:\n",
        "        if own > 2 * self._limit:\n",
        ("tests/test_engine.py", "tests/test_engine_ledger.py"),
    ),
]

DISTRIBUTED, RANKS = "ghostclip/engine/distributed.py", ("tests/test_ranks.py",)

SEVERAL_RANKS = [
    Mutant(
        "noise drawn on every rank",
        RELEASE,
        "released(self._noise, every, std, batch_size, parameters)",
        "released(self._noise, self._noise.release(every, std, 1.0), std, batch_size, parameters)",
        (*RANKS, "-k", "noise"),
    ),
    Mutant(
        "no noise on several ranks",
        "ghostclip/engine/distributed.py",
        "            totals[:] = noise.release(totals, std, divisor)\n",
        "            totals[:] = noise.release(totals, 0.0, divisor)\n",
        (*RANKS, "-k", "noise"),
    ),
    Mutant(
        "each rank steps with noise of its own",
        DISTRIBUTED,
        "        self.led(work)\n        return self.spread(totals)\n",
        "        work()\n        return totals\n",
        (*RANKS, "-k", "drawn_once"),
    ),
    Mutant(
        "the adaptive count of one rank only",
        DISTRIBUTED,
        "        totals = on_flat(sums, total)\n",
        "        totals = [*on_flat(sums[:-1], total), sums[-1]]\n",
        (*RANKS, "-k", "adaptive"),
    ),
    Mutant(
        "sums averaged over ranks",
        DISTRIBUTED,
        "            return numbers\n\n        totals = on_flat(sums, total)\n",
        "            return numbers / self.size\n\n        totals = on_flat(sums, total)\n",
        (*RANKS, "-k", "steps_of_one"),
    ),
    Mutant(
        "every rank takes the whole sample",
        "ghostclip/sampling/batches.py",
        "    chosen = chosen[rank::ranks]\n",
        "",
        (*RANKS, "-k", "steps_of_one"),
    ),
    Mutant(
        "every rank draws a sample of its own",
        DISTRIBUTED,
        'source.generator(hashlib.sha256(key + next(made).to_bytes(8, "big")).digest())',
        "source.generator()",
        (*RANKS, "-k", "drawn_once"),
    ),
    Mutant(
        "ranks at different batches release together",
        DISTRIBUTED,
        '        _refuse_differences([each.get("same", {}) for each in said], "at every step")\n',
        "",
        (*RANKS, "-k", "refused_on_all"),
    ),
    Mutant(
        "every rank charges the ledger",
        SPENDING,
        "        if self._ranks.size == 1:\n",
        "        if True:\n",
        (*RANKS, "-k", "charges"),
    ),
    Mutant(
        "DistributedDataParallel averages unseen",
        DISTRIBUTED,
        "        wrapper.require_backward_grad_sync = False\n",
        "        pass\n",
        (*RANKS, "-k", "steps_of_one"),
    ),
]

FUZZED = [
    Mutant(
        "scaled sums taken for sums",
        PASSES,
        "        if isinstance(scale, Tensor) or scale != 1.0:\n",
        "        if isinstance(scale, Tensor):\n",
        ("tests/test_self_check.py", "-k", "scaled"),
    ),
    Mutant(
        "a single number has no sum over uses",
        "ghostclip/clipper/second_pass.py",
        "self.totals[owner][slice(*rows) if rows else ...] += amount",
        "self.totals[owner][slice(*rows) if rows else slice(None)] += amount",
        ("tests/test_engine_sums.py", "-k", "first_amount"),
    ),
    Mutant(
        "weights with a margin for rounding taken for weights that others decide",
        "ghostclip/clipping/weighing.py",
        "    found: Any = policy.weights(norms)\n",
        "    found: Any = policy.weights(norms if isinstance(norms, dict) else norms * 1.01)\n",
        ("tests/test_weighing.py", "-k", "margin_for_rounding"),
    ),
]

BUILD = "ghostclip/native/build.py"
APPLICABLE, NATIVE = ("tests/test_planner_applicable.py",), ("tests/test_native.py",)
INTERRUPTS = ("tests/test_interrupts.py",)

AROUND = [
    Mutant(
        "a strategy that raises aborts the batch",
        "ghostclip/planner.py",
        "    except Exception as error:\n        raised[name] = error\n",
        "    except ZeroDivisionError as error:\n        raised[name] = error\n",
        APPLICABLE,
    ),
    Mutant(
        "Ctrl-C in a measurement counts as a strategy that raises",
        "ghostclip/planner.py",
        "    except Exception as error:\n        raised[name] = error\n",
        "    except BaseException as error:\n        raised[name] = error\n",
        APPLICABLE,
    ),
    Mutant(
        "where all that is worth it raises, nothing else is tried",
        "ghostclip/planner.py",
        "for name in [*worth, *_others(candidates, worth)]:",
        "for name in worth:",
        APPLICABLE,
    ),
    Mutant(
        "a library of any content is loaded",
        BUILD,
        " and path.name == _named(stem, path):\n",
        ":\n",
        NATIVE,
    ),
    Mutant(
        "a library that others may write to is loaded",
        BUILD,
        "stat.S_ISREG(status.st_mode) and _is_ours(status) and",
        "stat.S_ISREG(status.st_mode) and",
        NATIVE,
    ),
    Mutant(
        "what a link leads to is loaded",
        BUILD,
        "            status = path.lstat()\n",
        "            status = path.stat()\n",
        NATIVE,
    ),
    Mutant(
        "Ctrl-C after the ledger's lock was taken leaves it taken",
        "ghostclip/ledger/turns.py",
        "            with _open.lock:\n                return function(*args, **kwargs)\n",
        '            with __import__("contextlib").ExitStack() as stack:\n                _open.lock.acquire()\n'
        "                stack.callback(_open.lock.release)\n                return function(*args, **kwargs)\n",
        INTERRUPTS,
    ),
    Mutant(
        "Ctrl-C leaves grad mode off",
        "ghostclip/nn/grad_mode.py",
        "            if torch.is_grad_enabled() is not before:\n",
        "            if torch.is_grad_enabled() is None:\n",
        INTERRUPTS,
    ),
    Mutant(
        "Ctrl-C in the optimizer's step leaves grad mode off",
        RELEASE,
        "    @keeping_grad_mode\n    def _release(self)",
        "    def _release(self)",
        INTERRUPTS,
    ),
    Mutant(
        "a ledger that was changed in the middle is written on",
        JOURNAL,
        "if self._stamp is None or files.stamp(self._file) != self._stamp:",
        "if files.stamp(self._file)[0] != self.contents.size:",
        LEDGER,
    ),
    Mutant(
        "a ledger whose times can't be set is never read again",
        JOURNAL,
        "if self._stamp is None or files.stamp(self._file) != self._stamp:",
        "if self._stamp is not None and files.stamp(self._file) != self._stamp:",
        LEDGER,
    ),
    Mutant(
        "a step too early is told by what was discarded",
        RELEASE,
        'f"optimizer.step() was called after {batch.handed} of the',
        'f"optimizer.step() was called after {gathered} of the',
        ("tests/test_engine_guards.py", "-k", "left_early"),
    ),
    Mutant(
        "a rule's gradients may have any shape",
        "ghostclip/nn/base.py",
        "            self._check_shape(name, found)\n",
        "",
        ("tests/test_refusals.py",),
    ),
    Mutant(
        "a run without noise is called private",
        "ghostclip/cli/plan.py",
        ' if noise else "not private, no noise"\n',
        "\n",
        ("tests/test_cli_train.py", "-k", "without_noise"),
    ),
    Mutant(
        "Ctrl-C in the imports of a command is a traceback",
        "ghostclip/cli/__init__.py",
        '        return _end("interrupted", INTERRUPTED)',
        "        raise",
        ("tests/test_cli_interrupts.py",),
    ),
]

SHARED_NONFINITE = ("tests/test_nonfinite_shared.py", "-k")
LATE = ("tests/test_first_gradients.py", "-k")
COINCIDING = ("tests/test_coinciding_sizes.py", "-k")
OPEN = ("tests/test_open_boundaries.py", "-k")
MOVED = ("tests/test_moved_rows.py", "-k")
PROVED = [
    Mutant(
        "a normalised weight's gradient keeps its length",
        "ghostclip/norms/computed.py",
        "(taken - 2 * along * back) @ factor",
        "0 * along @ factor",
        ("tests/test_computed_weights.py", "-k", "function"),
    ),
    Mutant(
        "a weight normalization's direction keeps what lies along it",
        "ghostclip/norms/computed.py",
        "            gradients.addcmul_(products, self.back, value=-1.0)\n",
        "            pass\n",
        ("tests/test_computed_weights.py", "-k", "function"),
    ),
    Mutant(
        "an inner product over a matrix is taken for each row's",
        "ghostclip/norms/computed.py",
        "sum(2 if self.by_row else (1, 2), keepdim=True)",
        "sum(2, keepdim=True)",
        ("tests/test_computed_weights.py", "-k", "function or linear_layers"),
    ),
    Mutant(
        "a spectral norm is taken for a constant",
        "ghostclip/graph/shared/computed.py",
        "value / divisor, slope)",
        "value / divisor, 0 * slope)",
        ("tests/test_computed_weights.py", "-k", "function or linear_layers"),
    ),
    Mutant(
        "a quotient's numerator is taken for the parameter",
        "ghostclip/graph/shared/computed.py",
        " or node.next_functions[0][0] is not leaf",
        "",
        ("tests/test_computed_weights.py", "-k", "linear_layers and quotient or function and quotient"),
    ),
    Mutant(
        "a pruned weight's gradient is not masked",
        "ghostclip/norms/computed.py",
        "return gradients.mul_(self.factor)",
        "return gradients",
        ("tests/test_computed_weights.py", "-k", "linear_layers or function"),
    ),
    Mutant(
        "a normalised weight's lost digits are not measured again",
        "ghostclip/norms/computed.py",
        "        return squared.index_copy(0, lost, self.pick(lost).exact_squared_norms())\n",
        "        return squared\n",
        ("tests/test_computed_weights.py", "-k", "along_the_direction or rank_one"),
    ),
    Mutant(
        "a parameter beside a weight's is overlooked",
        "ghostclip/graph/shared/computed.py",
        "len(parameters) != 1 or ",
        "",
        ("tests/test_computed_weights.py", "-k", "function"),
    ),
    Mutant(
        "a factor of one type meets gradients of another",
        "ghostclip/graph/shared/computed.py",
        "tensor.detach().to(to_float32(term.left[:0]).dtype)",
        "to_float32(tensor.detach())",
        ("tests/test_computed_weights.py", "-k", "function and cast"),
    ),
    Mutant(
        "the transpose of a parameter is taken for the parameter",
        "ghostclip/graph/shared/boundary.py",
        "        left, right = (right, left) if transposed else (left, right)\n",
        "",
        ("tests/test_computed_weights.py", "-k", "function"),
    ),
    Mutant(
        "what a product is added to is not scaled",
        "ghostclip/graph/shared/boundary.py",
        "grad if beta == 1 else grad * beta",
        "grad",
        ("tests/test_computed_weights.py", "-k", "function and scaled"),
    ),
    Mutant(
        "a scaled product is taken for a plain one",
        "ghostclip/graph/shared/boundary.py",
        ' and getattr(self.node, "_saved_alpha", 1) == 1',
        "",
        ("tests/test_computed_weights.py", "-k", "function and scaled"),
    ),
    Mutant(
        "a transposed filter outside of layers is taken for a plain one",
        "ghostclip/graph/shared/boundary.py",
        "            images, grads = grads, images\n",
        "",
        ("tests/test_computed_weights.py", "-k", "filters"),
    ),
    Mutant(
        "positions of a transposed filter's own are none",
        "ghostclip/graph/shared/boundary.py",
        "if any(more >= step for more, step in zip(node._saved_output_padding, node._saved_stride, strict=True)):",
        "if False:",
        ("tests/test_computed_weights.py", "-k", "filters"),
    ),
    Mutant(
        "a table that is a factor, too, counts twice",
        "ghostclip/graph/shared/subgraph.py",
        "        reached = {id(parameter): parameter for parameter in self.leaves.values()}\n",
        "        reached: dict[int, Any] = {}\n",
        ("tests/test_shared_parameters.py", "-k", "counts_once"),
    ),
    Mutant(
        "only the last use of a shared tensor counts",
        "ghostclip/graph/shared/subgraph.py",
        "found.setdefault(edge, []).append(term)",
        "found[edge] = [term]",
        ("tests/test_computed_weights.py", "-k", "function"),
    ),
    Mutant(
        "steps are compiled before gradients reach all layers",
        "ghostclip/clipper/first_pass.py",
        "self.is_open = layout.calls, layout.check, not layout.stored\n",
        "self.is_open = layout.calls, None, False\n",
        (*LATE, "compiled"),
    ),
    Mutant(
        "rows of a product of heads are in the order of examples",
        "ghostclip/graph/shared/boundary.py",
        "split_examples(to_float32(each).movedim(1, 0), self.count, row_order)",
        "split_examples(to_float32(each).movedim(1, 0), self.count, 'example')",
        ("tests/test_layers.py", "-k", "bare and product"),
    ),
]

SHARDING = ("tests/test_sharding.py",)

SHARDED = [
    Mutant(
        "sharded models are wrapped",
        "ghostclip/wrap.py",
        "    sharding = sharding_of(model)\n",
        "    sharding = None\n",
        SHARDING,
    ),
    Mutant(
        "a model sharded after wrapping is clipped",
        "ghostclip/clipper/layout.py",
        "        if is_distributed():\n            refuse_sharded(",
        "        if False:\n            refuse_sharded(",
        SHARDING,
    ),
    Mutant(
        "a layer of a model sharded later is clipped",
        "ghostclip/nn/sharding.py",
        "(id(p) not in known or _divided(p))",
        "_divided(p)",
        SHARDING,
    ),
]

MIXED = [
    Mutant(
        "losses are compared in the first step only",
        COMPARISON,
        "STEPS, SELDOM = 6, 400\n",
        "STEPS, SELDOM = 1, 400\n",
        (*COMPARED, "-k", "how_often or later"),
    ),
    Mutant(
        "losses of later steps are never compared",
        COMPARISON,
        "            return self._dice.random() < 1.0 / SELDOM\n",
        "            return False\n",
        (*COMPARED, "-k", "how_often or later"),
    ),
    Mutant(
        "rows are never exchanged where random numbers are drawn",
        MIXING_TEST,
        "any(self._depends(half) for half in self._halves) else None\n",
        "False else None\n",
        (*COMPARED, "-k", "mixup"),
    ),
    Mutant(
        "compiled steps are not compared",
        "ghostclip/engine/compiled_steps.py",
        "            self._steps.prepare(loss_fn, examples)\n",
        "",
        (*COMPARED, "-k", "compiled"),
    ),
    Mutant(
        "what goes by a count of calls is refused",
        MIXING_TEST,
        "        for _ in range(TOSSES):\n",
        "        for _ in range(0):\n",
        (*COMPARED, "-k", "honest and every"),
    ),
    Mutant(
        "dropout that falls elsewhere is refused",
        TRIAL,
        "                self._quiet.update(running[-1:])\n",
        "                pass\n",
        (*COMPARED, "-k", "mix_are and dropout"),
    ),
    Mutant(
        "random numbers by the data are refused",
        MIXING_TEST,
        "        if not self._draws_alike(part):\n",
        "        if False:\n",
        (*COMPARED, "-k", "honest and drawn"),
    ),
    Mutant(
        "halves are compared in the order of their rows",
        MIXING_TEST,
        "        in_order = self._each > 1 if in_order is None else in_order\n",
        "        in_order = True\n",
        COLLATED,
    ),
    Mutant(
        "users' rows may be in any order",
        MIXING_TEST,
        "        in_order = self._each > 1 if in_order is None else in_order\n",
        "        in_order = bool(in_order)\n",
        COLLATED,
    ),
    Mutant(
        "a user's rows may not depend on each other",
        STEP,
        "units = rows if users is None else users.users\n",
        "units = rows\n",
        (*COMPARED, "-k", "users"),
    ),
    Mutant(
        "buffers keep examples unseen",
        MIXING_TEST,
        '                return Kept("buffer", name)\n',
        "                pass\n",
        ("tests/test_self_check.py",),
    ),
]

EXCHANGED = ("tests/test_replaced_layers.py",)
KEYS = ("tests/test_compiled_keys.py",)
IN_GRAPHS = ("tests/test_compiled_rounding.py", "-m", "not slow")
COMPILED = [
    Mutant(
        "decisions are keyed by ids that are given again",
        "ghostclip/graph/parameter_names.py",
        "    number = next(_numbers)\n",
        "    number = address\n",
        EXCHANGED,
    ),
    Mutant(
        "a graph is found by the ids of objects that are gone",
        "ghostclip/compiled/clip.py",
        "        return [*asked.kept, *self.state.objects]\n",
        "        return []\n",
        KEYS,
    ),
    Mutant(
        "what a module holds is no part of a graph's key",
        "ghostclip/compiled/signature.py",
        "            objects += own.values()\n",
        "",
        KEYS,
    ),
    Mutant(
        "True is 1 for a graph",
        "ghostclip/compiled/signature.py",
        "        return kind, repr(value)\n",
        "        return value\n",
        KEYS,
    ),
    Mutant(
        "keyword defaults are no part of a graph's key",
        "ghostclip/compiled/signature.py",
        "function.__defaults__, function.__kwdefaults__,",
        "function.__defaults__,",
        KEYS,
    ),
    Mutant(
        "a graph's key is of the sensitivity alone",
        "ghostclip/compiled/clip.py",
        "policy = (self.passes.clipping.sensitivity, *settings_of(self.passes.clipping, kept))",
        "policy = self.passes.clipping.sensitivity",
        KEYS,
    ),
    Mutant(
        "hooks are not called in a graph",
        "ghostclip/compiled/clip.py",
        "if (name := self.state.hooked()) is not None:",
        "if (name := self.state.hooked()) == 0:",
        KEYS,
    ),
    Mutant(
        "a parameter in another group keeps its learning rate",
        "ghostclip/compiled/update.py",
        'return [sum([p.requires_grad for p in group["params"]]), *settings]',
        "return settings",
        KEYS,
    ),
    Mutant(
        "compiling leaves its forwards in buffers",
        "ghostclip/compiled/clip.py",
        "with Replay(self.model).again(gradients=True):",
        "with torch.enable_grad():",
        KEYS,
    ),
    Mutant(
        "compiling a whole step leaves its forwards in buffers",
        "ghostclip/compiled/clip.py",
        "            with Replay(self.model).again(gradients=True):\n",
        "            with torch.enable_grad():\n",
        KEYS,
    ),
    Mutant(
        "a forward that is tried leaves attributes behind",
        "ghostclip/clipper/replay.py",
        "        own.update(attributes)\n",
        "",
        KEYS,
    ),
    Mutant(
        "a model that changes itself is compiled",
        "ghostclip/compiled/clip.py",
        "if (self.state.now(), function_key(loss_fn)[0]) != before:",
        "if before is None:",
        KEYS,
    ),
    Mutant(
        "a refusal to compile is forgotten",
        "ghostclip/compiled/clip.py",
        "return self._failures >= MOST_FAILURES",
        "return False",
        KEYS,
    ),
    Mutant(
        "weights in a graph have no rounding margin",
        "ghostclip/compiled/trace_friendly.py",
        "passes.clipping.weights(bounds)",
        "passes.clipping.weights(norms)",
        IN_GRAPHS,
    ),
]

MISUSE = [
    Mutant(
        "another optimizer's steps pass",
        UPDATE_CHECK,
        "            if this != that and parameter.requires_grad:\n",
        "            if False:\n",
        (*UPDATES, "-k", "second_optimizer"),
    ),
    Mutant(
        "parameters set from outside pass",
        RELEASE,
        "            self.updates.check()\n",
        "",
        (*UPDATES, "-k", "outside"),
    ),
    Mutant(
        "epsilon of a model trained by others",
        "ghostclip/engine/privacy_engine.py",
        "            self._steps.updates.check()\n",
        "            pass\n",
        (*UPDATES, "-k", "second_optimizer or outside"),
    ),
    Mutant(
        "a checkpoint of a model trained by others",
        "ghostclip/engine/snapshots.py",
        "        self.steps.updates.check()\n",
        "",
        (*UPDATES, "-k", "second_optimizer or outside"),
    ),
    Mutant(
        "sums without noise are accepted",
        "ghostclip/engine/privacy_engine.py",
        '        self._steps.check_between("engine.accept_parameters()")\n',
        "",
        (*UPDATES, "-k", "accepted_away"),
    ),
    Mutant(
        "another type after the engine was built",
        UPDATE_CHECK,
        "        if now == self._types:\n",
        "        if True:\n",
        (*UPDATES, "-k", "types"),
    ),
    Mutant(
        "parameters exchanged after the engine was built",
        UPDATE_CHECK,
        "            if now.get(name) is not before.get(name):\n",
        "            if False:\n",
        (*UPDATES, "-k", "objects"),
    ),
    Mutant(
        "exchanged parameters are not looked for at the step",
        RELEASE,
        "        self.updates.check_model()\n",
        "",
        (*UPDATES, "-k", "objects"),
    ),
    Mutant(
        "a batch without a step is skipped",
        RELEASE,
        "                raise PrivacyError(NO_STEP)\n",
        "                pass\n",
        (*TAKEN_TURNS, "-k", "without_a_step"),
    ),
    Mutant(
        "an empty batch needs no step",
        RELEASE,
        "            if batch is not None and not batch.failed and",
        "            if batch is not None and batch.sizes and not batch.failed and",
        (*TAKEN_TURNS, "-k", "without_a_step"),
    ),
    Mutant(
        "leaving the physical batches is taken for an exception",
        RELEASE,
        "not (new_loop and batch.interrupted)",
        "not batch.interrupted",
        (*TAKEN_TURNS, "-k", "without_a_step"),
    ),
    Mutant(
        "an exception excuses a batch that went on",
        STEP,
        '        self.release.current("engine.backward()").failed = False\n',
        "",
        (*TAKEN_TURNS, "-k", "mended"),
    ),
    Mutant(
        "a part of a parameter and the whole of it are measured apart",
        "ghostclip/clipper/collector.py",
        "    return None in parts or any(",
        "    return any(",
        ("tests/test_shared_parameters.py", "-k", "as_a_whole_and_by_parts"),
    ),
    Mutant(
        "the first dimension, counted from the last, is another one",
        "ghostclip/graph/nodes.py",
        "[signed(dim) % max(1, total) for dim",
        "[signed(dim) for dim",
        ("tests/test_mixing.py", "-k", "order_that_changes"),
    ),
    Mutant(
        "proofs of trials are believed",
        "ghostclip/engine/micro_batching.py",
        "        with clipper.passes.forgetting():\n",
        "        if True:\n",
        ("tests/test_auto_physical.py", "-k", "copies"),
    ),
    Mutant(
        "a loss function may fill gradients in a compiled step",
        "ghostclip/clipper/clipper.py",
        "            self._guard.check(trained)  # the loss function ran meanwhile\n",
        "",
        ("tests/test_compiled.py", "-k", "fills_gradients"),
    ),
    Mutant(
        "what a declared class leaves in a list is overlooked",
        "ghostclip/nn/comparing.py",
        "        names += [name for name, now, before in self._lists if list(map(id, now)) != list(map(id, before))]\n",
        "",
        ("tests/test_same_as_refusals.py", "-k", "containers"),
    ),
    Mutant(
        "trials of sizes take random numbers",
        "ghostclip/engine/micro_batching.py",
        "    with Replay(clipper.model).again(gradients=True):\n",
        "    if True:\n",
        ("tests/test_auto_physical.py", "-k", "trace"),
    ),
    Mutant(
        "a batch too large for memory is taken all the same",
        "ghostclip/engine/micro_batching.py",
        "            if (peak := peak_of(size)) > limit:\n",
        "            if (peak := peak_of(size)) == math.inf:\n",
        ("tests/test_auto_physical.py", "-k", "found"),
    ),
    Mutant(
        "a discarded batch is not charged",
        STEP,
        "                self.release.start(discarded=True)\n                self.release.charge(self.release.terms)\n",
        "                self.release.start(discarded=True)\n",
        (*TAKEN_TURNS, "-k", "discard"),
    ),
    Mutant(
        "a step of an optimizer without the engine's hooks",
        RELEASE,
        "        self._release()\n        self.optimizer.step()\n",
        "        self.optimizer.step()\n",
        (*RELEASES, "-k", "without_hooks"),
    ),
    Mutant(
        "a step without a release passes",
        RELEASE,
        "        if not self._released:\n",
        "        if False:\n",
        (*RELEASES, "-k", "closure"),
    ),
    Mutant(
        "an engine is copied",
        "ghostclip/engine/privacy_engine.py",
        "    def __reduce_ex__(self, protocol: Any) -> Any:\n",
        "    def _reduce(self, protocol: Any) -> Any:\n",
        (*RELEASES, "-k", "copied"),
    ),
    Mutant(
        "a rank without a step leaves the others waiting",
        RELEASE,
        "                self._ranks.refuse(problem)\n",
        "                pass\n",
        (*RANKS, "-k", "refused_on_all and (forgotten or moved)"),
    ),
    Mutant(
        "a rank discards what the others step with",
        RELEASE,
        '{"same": {"whether the batch is discarded": discarded}}',
        '{"same": {}}',
        (*RANKS, "-k", "refused_on_all and discarded"),
    ),
]

DECLARED, SAME_AS = "ghostclip/nn/declared.py", ("tests/test_same_as.py", "tests/test_same_as_refusals.py")

SAME = [
    Mutant(
        "what is declared is not verified",
        DECLARED,
        "        if conditions not in _verified.get(self, ()):\n",
        "        if False:\n",
        SAME_AS,
    ),
    Mutant(
        "what is declared is verified in one mode for all",
        DECLARED,
        "        return (self.wrapped.forward, self.training, ",
        "        return (self.wrapped.forward, ",
        SAME_AS,
    ),
    Mutant(
        "a subclass of a declared class is taken for it",
        "ghostclip/wrap.py",
        "    if found in DECLARED:\n        return DECLARED[found]\n",
        "    for base in found.__mro__:\n        if base in DECLARED:\n            return DECLARED[base]\n",
        SAME_AS,
    ),
    Mutant(
        "a declared class's own forward runs under the rule of torch's",
        DECLARED,
        "    stand_in = type(kind.__name__, (_StandIn, rule), ",
        "    stand_in = type(kind.__name__, (_StandIn, rule, kind), ",
        SAME_AS,
    ),
    Mutant(
        "a declared class has parameters of its own",
        DECLARED,
        "for name, _ in module.named_parameters() if name not in names]",
        "for name, _ in module.named_parameters() if False]",
        SAME_AS,
    ),
]

GATHERED = ("tests/test_engine_sums.py",)

# What stands in p.grad between a backward and the step.
WITHIN = [
    Mutant(
        "what is in p.grad is taken for the clipped sum",
        SUMS,
        "        found = self._totals.get(id(parameter))\n",
        "        found = self._totals.get(id(parameter)) if parameter.grad is None else parameter.grad\n",
        (*GATHERED, "-k", "no_effect and (data or assigned)"),
    ),
    Mutant(
        "clipped sums stand in p.grad before the step",
        SUMS,
        "            self.count += not more\n",
        "            for _, p in self._named:\n"
        "                p.grad = self._totals[id(p)] if id(p) in self._totals and p.dtype.itemsize > 2 else None\n"
        "            self.count += not more\n",
        (*GATHERED, "-k", "no_effect and data"),
    ),
    Mutant(
        "gradients of others are added to the private one",
        SUMS,
        "            self.drop_gradients()\n"
        "            for parameter, total in zip(stepped, private, strict=True):\n"
        "                parameter.grad = total.to(parameter.dtype)\n",
        "            for parameter, total in zip(stepped, private, strict=True):\n"
        "                foreign = 0 if parameter.grad is None else parameter.grad\n"
        "                parameter.grad = total.to(parameter.dtype) + foreign\n",
        (*GATHERED, "-k", "no_effect"),
    ),
    Mutant(
        "parameters that the optimizer doesn't step keep what others wrote",
        SUMS,
        "            self._warn_of_lost()\n            self.drop_gradients()\n",
        "            self._warn_of_lost()\n",
        (*GATHERED, "-k", "frozen"),
    ),
    Mutant(
        "what the last step left stays in p.grad beside the next sums",
        SUMS,
        "            self._keep_new()\n            self.drop_gradients()\n",
        "            self._keep_new()\n",
        (*GATHERED, "-k", "forgotten"),
    ),
    Mutant(
        "a gradient added to what a step left passes",
        "ghostclip/clipper/gradient_guard.py",
        "        return known is not None and known[0]() is grad and known[1] == grad._version\n",
        "        return known is not None and known[0]() is grad\n",
        (*GATHERED, "-k", "added_to"),
    ),
    Mutant(
        "sums of an earlier physical batch are replaced",
        SUMS,
        "            torch._foreach_add_([totals[owner] for owner in both], [new[owner] for owner in both])\n",
        "            totals |= new\n",
        (*GATHERED, "-k", "clipped_mean"),
    ),
    Mutant(
        "a failed backward leaves a part of its sums",
        SUMS,
        "            self._keep(more)\n        finally:\n            self._new.totals.clear()\n",
        "            self.count += not more\n        finally:\n            self._keep_new()\n",
        ("tests/test_engine_guards.py", "-k", "half_way"),
    ),
]

TRACE, TRACED = "ghostclip/traces/steps.py", ("tests/test_trace.py",)

OBSERVED = [
    Mutant(
        "an example that is not finite is in a trace's sums",
        PASSES,
        "self._sum(losses, run, weights, finite, True, sums.add)",
        "self._sum(losses, run, torch.ones_like(some), None, True, sums.add)",
        (*TRACED, "-k", "not_finite"),
    ),
    Mutant(
        "every step is observed",
        TRACE,
        "self._seen = self._passes.unclipped(losses, self._group_of) if self._due else None",
        "self._seen = self._passes.unclipped(losses, self._group_of)",
        (*TRACED, "-k", "other_steps_are_not_observed"),
    ),
    Mutant(
        "the noise of a traced group is that of one entry",
        TRACE,
        "p.numel() * std**2",
        "std**2",
        (*TRACED, "-k", "single_gradients"),
    ),
    Mutant(
        "the noise scale's variance is the biased one",
        TRACE,
        "variance = (mean - of_mean) * size / (size - 1)",
        "variance = mean - of_mean",
        (*TRACED, "-k", "unbiased"),
    ),
    Mutant(
        "a trace says nothing of being private",
        TRACE,
        '        log.warning("tracing every',
        '        log.debug("tracing every',
        ("tests/test_trace_files.py", "-k", "private"),
    ),
    Mutant(
        "epsilon that grows leaves out what was spent before",
        "ghostclip/accounting/running.py",
        "        self._start = np.ones_like(self._one) if rest is None else self._transform(rest)\n",
        "        self._start = np.ones_like(self._one)\n",
        ("tests/test_running_epsilon.py",),
    ),
    Mutant(
        "calibration trusts the coarse grid",
        "ghostclip/accounting/calibration.py",
        "    few, enough = _bracket(excess, start, step, *NOISE_LIMITS)\n",
        "    few, enough = start - 1e-9, start\n",
        ("tests/test_calibration.py",),
    ),
    Mutant(
        "epsilon that grows counts one neighbour only",
        "ghostclip/accounting/running.py",
        "        return max(each.epsilon(count, self._delta) for each in self._directions) * (1.0 + ROUNDING)\n",
        "        return min(each.epsilon(count, self._delta) for each in self._directions) * (1.0 + ROUNDING)\n",
        ("tests/test_running_epsilon.py",),
    ),
    Mutant(
        "a tracker sends the size of the batch",
        "ghostclip/integrations/tracking.py",
        '        "privacy/steps": float(engine.steps_taken),\n',
        '        "privacy/steps": float(engine.steps_taken),\n        "batch": float(engine.batches().largest),\n',
        ("tests/test_tracking.py",),
    ),
    Mutant(
        "a compiled function in the graph is taken for any operation",
        "ghostclip/graph/reader.py",
        "            if kind.__name__ in HIDING:\n",
        '            if kind.__name__ in HIDING and kind.__name__ != "CompiledFunctionBackward":\n',
        ("tests/test_torch_compile.py",),
    ),
    Mutant(
        "norms in one call leave the model wrapped",
        "ghostclip/wrap.py",
        "            module.__class__ = kind\n            for name, value in own.items():\n",
        "            for name, value in own.items():\n",
        ("tests/test_per_example_norms.py",),
    ),
]

INTEGRATED = [
    Mutant(
        "sums of sharded models are averaged over ranks",
        "ghostclip/clipper/layout.py",
        "mesh, [Partial()] * mesh.ndim",
        'mesh, [Partial("avg")] * mesh.ndim',
        ("tests/test_fsdp.py",),
    ),
    Mutant(
        "shards of a sharded model get no noise",
        "ghostclip/engine/sharded.py",
        "lambda: noise.release(totals, std, divisor) if draws else totals",
        "lambda: noise.release(totals, 0.0, divisor) if draws else totals",
        ("tests/test_fsdp_engine.py",),
    ),
    Mutant(
        "each replica of a shard draws noise of its own",
        "ghostclip/engine/sharded.py",
        "        shards = shards if self._replicas is None else self._from_first_replica(shards)\n",
        "",
        ("tests/test_fsdp_engine.py",),
    ),
    Mutant(
        "Trainer logs the training loss",
        "ghostclip/integrations/huggingface.py",
        "            if value is not None and kept and self.privacy.log_private_loss:\n",
        "            if value is not None and kept:\n",
        ("tests/test_huggingface.py", "tests/test_huggingface_options.py"),
    ),
    Mutant(
        "Trainer takes a checkpoint that was not written to its end",
        "ghostclip/integrations/huggingface_loop.py",
        "    return (checkpoint / STATE).is_dir()\n",
        "    return True\n",
        ("tests/test_huggingface_checkpoints.py",),
    ),
    Mutant(
        "Lightning forgets what a fit after the checkpoint spent",
        "ghostclip/integrations/lightning/callback.py",
        "            self._states = [self.engine.state_dict()]\n",
        "            pass\n",
        ("tests/test_lightning_resume.py",),
    ),
    Mutant(
        "mean losses in Opacus's interface are taken for sums",
        "ghostclip/compat/opacus/backward.py",
        "        return losses * rows if self._mean else losses\n",
        "        return losses\n",
        ("tests/test_compat_opacus.py",),
    ),
    Mutant(
        "rows of ragged examples are weighted as the first example's",
        "ghostclip/norms/ragged.py",
        "weights if rows is None else weights[rows.index]",
        "weights if rows is None else weights[rows.index * 0]",
        ("tests/test_ragged.py",),
    ),
    Mutant(
        "a state_dict's spending isn't counted",
        "ghostclip/engine/snapshots.py",
        "        found, _ = self.ranks.agreed(check)\n        self._count(found)\n",
        "        found, _ = self.ranks.agreed(check)\n",
        ("tests/test_fsdp_checkpoints.py",),
    ),
    Mutant(
        "another accountant in Opacus's interface starts anew",
        "ghostclip/compat/opacus/privacy_engine.py",
        "            other.take_over(self._accountant)\n",
        "",
        ("tests/test_compat_opacus_records.py", "-k", "accountant or epsilon"),
    ),
    Mutant(
        "nested tensors are divided as dense ones are",
        "ghostclip/clipper/replay.py",
        "torch.arange(start, stop)) if tensor.is_nested else",
        "torch.arange(start, stop)) if False else",
        ("tests/test_nested.py",),
    ),
    Mutant(
        "rows of a nested tensor are its first ones",
        "ghostclip/clipper/replay.py",
        "[parts[row] for row in rows.tolist()]",
        "list(parts[: len(rows)])",
        ("tests/test_nested.py",),
    ),
    Mutant(
        "nested tensors go into compiled graphs",
        "ghostclip/clipper/replay.py",
        "    if not nested and any(leaf.is_nested for leaf in leaves):\n",
        "    if False:\n",
        ("tests/test_nested.py",),
    ),
    Mutant(
        "an empty batch in Opacus's interface keeps an example",
        "ghostclip/compat/opacus/empty_batch.py",
        "max(0, 2 * first - second)",
        "first",
        ("tests/test_compat_opacus_empty.py",),
    ),
    Mutant(
        "the row that stands for an empty batch has an example's numbers",
        "ghostclip/compat/opacus/empty_batch.py",
        "            return torch.ones_like(one)\n        for dim",
        "            return one\n        for dim",
        ("tests/test_compat_opacus_empty.py",),
    ),
    Mutant(
        "any loss of a classifier is taken for the mean over its rows",
        "ghostclip/compat/opacus/model_losses.py",
        "    return found if bool(same) else None\n",
        "    return found\n",
        ("tests/test_compat_opacus_models.py",),
    ),
    Mutant(
        "a warning of steps that the accountant counts",
        "ghostclip/compat/opacus/accountants.py",
        "        return events in self._engines\n",
        "        return False\n",
        ("tests/test_compat_opacus_refusals.py", "-k", "warning"),
    ),
    Mutant(
        "no warning of steps that another accountant counts",
        "ghostclip/compat/opacus/accountants.py",
        "        return events in self._engines\n",
        "        return True\n",
        ("tests/test_compat_opacus_refusals.py", "-k", "warning"),
    ),
    Mutant(
        "the examples of outputs are sought by size in every batch",
        "ghostclip/compat/opacus/backward.py",
        "        dims = self._batch_dims if known is None else (known,)\n",
        "        dims = self._batch_dims\n",
        ("tests/test_compat_opacus.py",),
    ),
    Mutant(
        "a batch that a hook of Lightning leaves out is free",
        "ghostclip/integrations/lightning/fitting.py",
        "            batch.discard()\n",
        "            pass\n",
        ("tests/test_lightning_refusals.py",),
    ),
    Mutant(
        "sums of a sharded model's later physical batches replace those of earlier ones",
        "ghostclip/engine/sharded.py",
        "            self._shards[place] += found\n",
        "            self._shards[place] = found\n",
        ("tests/test_fsdp_fetching.py",),
    ),
    Mutant(
        "a physical batch may be repeated after some of its sums were reduced",
        "ghostclip/engine/sharded.py",
        "            self._lost = self._lost or self._begun\n",
        "            self._lost = False\n",
        ("tests/test_fsdp_fetching.py",),
    ),
    Mutant(
        "whole parameters of a sharded model may be written within a batch",
        "ghostclip/engine/sharded.py",
        "        return super()._written() or self._layout.written()\n",
        "        return super()._written()\n",
        ("tests/test_fsdp_engine.py",),
    ),
]

# A finding without a line, or with another one, sends its reader to the wrong place.
CHECKED = [
    Mutant(
        "a trial leaves the hooks that its forward added",
        "ghostclip/clipper/replay.py",
        "            if [*map(id, own[name].values())] != [*map(id, before.values())]:\n",
        "            if False:\n",
        ("tests/test_self_check.py",),
    ),
    Mutant(
        "a normalization's scale outside of layers gets the shift's gradient",
        "ghostclip/graph/shared/boundary.py",
        "            grad = grad * ((x - mean) * rstd).view_as(grad)\n",
        "            pass\n",
        ("tests/test_layers.py", "-k", "group_norm"),
    ),
    Mutant(
        "check looks at no buffers",
        CHECKING,
        "    if (kept := test.kept()) is not None:\n",
        "    if (kept := None) is not None:\n",
        ("tests/test_data_swap.py",),
    ),
    Mutant(
        "a delta of one over n is not warned about",
        "ghostclip/accounting/spent.py",
        "if 1 / units <= delta < 1:",
        "if 1 / units < delta / 10 < 1:",
        ("tests/test_cli_train.py", "-k", "promises_nothing"),
    ),
    Mutant(
        "a loop with engine.backward isn't told what can't be tested",
        "ghostclip/engine/step.py",
        "            self._self_check.cannot_compare()\n",
        "",
        ("tests/test_self_check.py",),
    ),
    Mutant(
        "a term of another shape is taken",
        "ghostclip/nn/base.py",
        'if getattr(found, "shape", None) != self._shape_of(name):',
        "if found is None:",
        ("tests/test_refusals.py",),
    ),
    Mutant(
        "where slices begin and end isn't told",
        "ghostclip/graph/nodes.py",
        "    if type(node.next_functions[0][0]) is ACCUMULATE:\n        return dim\n",
        "    if type(node) is not ACCUMULATE:\n        return dim\n",
        ("tests/test_structures.py",),
    ),
    Mutant(
        "the second and the third of a node's outputs are told apart by hashes that are the same",
        "ghostclip/graph/reader.py",
        "words.append(~number)",
        "words.append(-number)",
        ("tests/test_structures.py",),
    ),
    Mutant(
        "what an operation says of how it moves entries isn't told",
        "ghostclip/graph/nodes.py",
        "else _number_of(signature(node))\n",
        "else None\n",
        ("tests/test_structures.py",),
    ),
    Mutant(
        "which output of a split a layer reads isn't told",
        "ghostclip/graph/reader.py",
        "        if number:\n",
        "        if False:\n",
        ("tests/test_structures.py",),
    ),
    Mutant(
        "which of two inputs an operation uses again isn't told",
        "ghostclip/graph/reader.py",
        "words.append(places.get(node))\n",
        "words.append(0)\n",
        ("tests/test_structures.py",),
    ),
    Mutant(
        "two layers of one kind are taken for each other",
        "ghostclip/graph/reader.py",
        "words += (serial_number(call.layer), ",
        "words += (0, ",
        ("tests/test_structures.py",),
    ),
    Mutant(
        "where a view has ones isn't told",
        "ghostclip/graph/nodes.py",
        "1 in shape and tuple(",
        "1 in shape and bool(",
        ("tests/test_structures.py",),
    ),
    Mutant(
        "how often a rotation by a quarter is done isn't told",
        "ghostclip/graph/nodes.py",
        "name not in FACTORS | SIZES]",
        'name not in FACTORS | SIZES | {"_saved_k"}]',
        ("tests/test_structure_words.py", "-k", "rot90"),
    ),
    Mutant(
        "numbers of two operations are the same where Python's hashes of them are",
        "ghostclip/graph/nodes.py",
        "return next(NUMBERS)\n",
        "return hash(signature)\n",
        ("tests/test_structure_words.py", "-k", "select or roll"),
    ),
    Mutant(
        "saved tensors are read for the structure",
        "ghostclip/graph/nodes.py",
        ' and not hasattr(kind, f"_raw{name}")]',
        "]",
        ("tests/test_structure_words.py", "-k", "unpacked"),
    ),
    Mutant(
        "strides are told without the shape they are used on",
        "ghostclip/graph/nodes.py",
        "shape_of(edge) if edge[0] is not None else torch.Size()\n",
        "torch.Size()\n",
        ("tests/test_structure_words.py", "-k", "as_strided"),
    ),
    Mutant(
        "windows that begin later in each example are parts of the input",
        "ghostclip/graph/nodes.py",
        " and size[0] * stride[0] == shape.numel():\n",
        ":\n",
        ("tests/test_structure_words.py", "-k", "begin_later"),
    ),
    Mutant(
        "strides of all entries in any order are a view",
        "ghostclip/graph/nodes.py",
        "(in_order[0], *stride) == (shape.numel(), *in_order[1:]):",
        "in_order[0] == shape.numel():",
        ("tests/test_structure_words.py", "-k", "another_order"),
    ),
    Mutant(
        "a slice to the last but one has another structure at each length",
        "ghostclip/graph/nodes.py",
        "return place - size if 2 * place > size else place\n",
        "return place\n",
        ("tests/test_structure_words.py", "-k", "another_length"),
    ),
    Mutant(
        "an empty slice is taken for a whole one",
        "ghostclip/graph/nodes.py",
        "    if place is None or (place := signed(place)) >= size:\n        return None\n",
        "    if place is None or (place := signed(place)) > size:\n        return None\n",
        ("tests/test_structure_words.py", "-k", "empty"),
    ),
    Mutant(
        "how long a copied part is isn't told",
        "ghostclip/graph/nodes.py",
        "*_range(start, start + node._saved_length, size)\n",
        "*_range(start, start, size)\n",
        ("tests/test_structure_words.py", "-k", "narrow_copy"),
    ),
    Mutant(
        "where a part is written isn't told",
        "ghostclip/graph/nodes.py",
        "    size = shape_of((node, 0))[signed(dim)]\n",
        "    return dim\n    size = shape_of((node, 0))[signed(dim)]\n",
        ("tests/test_structure_words.py", "-k", "slice_scatter"),
    ),
    Mutant(
        "by how much an image is enlarged isn't told",
        "ghostclip/graph/nodes.py",
        "[(new // old, 0) if",
        "[(0, 0) if",
        ("tests/test_structure_words.py", "-k", "enlarged"),
    ),
    Mutant(
        "a factor that grows with the length gives another structure",
        "ghostclip/graph/nodes.py",
        '("alpha", "beta",',
        '("beta",',
        ("tests/test_structure_words.py", "-k", "factor"),
    ),
    Mutant(
        "the number of examples that a group norm saves gives another structure",
        "ghostclip/graph/nodes.py",
        '("H", "HxW", "N",',
        '("H", "HxW",',
        ("tests/test_structure_words.py", "-k", "group_norm"),
    ),
    Mutant(
        "check takes no norms of its batch",
        CHECKING,
        "    return findings or _refusal(",
        "    return findings or [] and _refusal(",
        ("tests/test_check_lines.py",),
    ),
    Mutant(
        "a finding has the outermost line",
        "ghostclip/graph/source_lines.py",
        "for each in reversed(kept) if",
        "for each in kept if",
        LINES,
    ),
    Mutant(
        "a moved row is looked for along one of two dimensions",
        "ghostclip/graph/operation_log.py",
        "        if moved and None not in moved:\n",
        "        if any(row is not None for row in moved):\n",
        LINES,
    ),
    Mutant(
        "memory that nothing was written to counts as moved",
        "ghostclip/graph/operation_log.py",
        'in () if "empty" in func.__name__ else tree_leaves(found):',
        "in tree_leaves(found):",
        LINES,
    ),
]

# Rows that are picked by index and put back: an error there gives an example's rows to another one.
PICKED, PICKS = "ghostclip/graph/picked_rows.py", ("tests/test_experts_mistakes.py",)
EXPERTS = ("tests/test_experts.py",)
FOLLOWED = [
    Mutant(
        "an example's rows at all experts are one sum",
        "ghostclip/norms/experts.py",
        "pairs = numbers.repeat_interleave(counts) * self.examples + self.rows.index",
        "pairs = 0 * numbers.repeat_interleave(counts) + self.rows.index",
        EXPERTS,
    ),
    Mutant(
        "rows that nothing uses count",
        "ghostclip/norms/ragged.py",
        "    term = term if row_order.used is None else term.keep_only(row_order.used)\n",
        "",
        PICKS,
    ),
]

# Norms of ragged examples.
RAGGED_NORMS = [
    Mutant(
        "digits that cancel between rows of ragged examples are lost",
        "ghostclip/norms/ragged.py",
        " if bool(gram_is_reliable(squared, scale).all()) else None",
        "",
        ("tests/test_ragged.py",),
    ),
    Mutant(
        "rows of ragged examples are taken to be in order",
        "ghostclip/norms/ragged.py",
        "term = term if self._is_sorted else term.pick(self._order)",
        "term = term if len(self) else term.pick(self._order)",
        ("tests/test_ragged.py",),
    ),
    Mutant(
        "the margin of ragged examples is that of a row",
        "ghostclip/norms/ragged.py",
        "(squared, scale * positions * self._counts)",
        "(squared, scale)",
        ("tests/test_ragged.py",),
    ),
    Mutant(
        "the first row of each ragged example is left out",
        "ghostclip/native/gram.c",
        "const long start = starts[example], rows = starts[example + 1] - start;",
        "const long start = starts[example] + 1, rows = starts[example + 1] - start;",
        ("tests/test_native_gram.py",),
    ),
]

# Rows of ragged examples that are followed through the graph, with no other test after the first batch.
RAGGED, OWNERS = "ghostclip/graph/ragged_rows.py", ("tests/test_ragged_rows.py",)
OWNED = [
    Mutant(
        "the order of examples in a packed sequence isn't among its lengths",
        "ghostclip/nn/rnn/layers.py",
        "call.lengths = packed.batch_sizes, packed.sorted_indices",
        "call.lengths = (packed.batch_sizes,)",
        ("tests/test_lengths.py",),
    ),
    Mutant(
        "offsets of bags are no lengths",
        "ghostclip/nn/embedding_bag.py",
        "call.lengths = (inputs[1],)",
        "call.lengths = ()",
        ("tests/test_lengths.py",),
    ),
    Mutant(
        "a computed weight in the place of a parameter is taken for it",
        "ghostclip/nn/base.py",
        "if not trained or any(map(GRAD_FN, values)):",
        "if not trained:",
        ("tests/test_functional_call.py",),
    ),
    Mutant(
        "other parameters in the place of a layer's own are taken for them",
        "ghostclip/graph/parameter_names.py",
        "if call.values and owners != list(map(id, call.values)):",
        "if False:",
        ("tests/test_functional_call.py",),
    ),
]

OF_COMPANY = [
    Mutant(
        "a batch larger than all before isn't compared",
        COMPARISON,
        "        if not (self._is_due(logical) or larger):\n",
        "        if not self._is_due(logical):\n",
        (*COLLATED, "-k", "one_long_text"),
    ),
    Mutant(
        "some rows speak for a batch that is larger than they are",
        COMPARISON,
        "            if not found.hold(batch, len(rows)):\n",
        "            if False:\n",
        (*COLLATED, "-k", "one_long_text"),
    ),
    Mutant(
        "what was not compared counts as compared",
        CUTTING,
        "            key in self._largest and all(",
        "            key not in self._largest or all(",
        (*COLLATED, "-k", "one_long_text"),
    ),
    Mutant(
        "long and short texts are in both halves",
        MIXING_TEST,
        "        return sorted(order, key=longest.__getitem__)\n",
        "        return order\n",
        COLLATED,
    ),
    Mutant(
        "data sets that read several at once are read one by one",
        LOADING,
        "            if _random_states() == before:\n",
        "            if False:\n",
        COLLATED,
    ),
    Mutant(
        "augmentations of rows are drawn anew each time",
        LOADING,
        "            return _copied(self._read[row])\n",
        "            return self._read.pop(row)\n",
        (*COLLATED, "-k", "read_once"),
    ),
    Mutant(
        "loading again leaves other random numbers",
        LOADING,
        "    with torch.random.fork_rng(_devices()):\n",
        "    if True:\n",
        (*COLLATED, "-k", "no_trace"),
    ),
    Mutant(
        "a random collate function is held against itself",
        TRIAL,
        "        self.draws = self.collate_draws or ",
        "        self.draws = ",
        COLLATED,
    ),
    Mutant(
        "batches loaded again miss what others go through",
        "ghostclip/engine/step.py",
        "batch.rows[batch.handed - 1], batch.passed)\n",
        "batch.rows[batch.handed - 1], lambda each: each)\n",
        (*COLLATED, "-k", "go_through"),
    ),
    Mutant(
        "a finding of padding blames a layer",
        MIXING_TEST,
        "        return OF_COMPANY if self._is_padded() else self.place() or OF_COMPANY\n",
        "        return self.place() or OF_COMPANY\n",
        (*COLLATED, "-k", "not_the_layer"),
    ),
    Mutant(
        "lists of one entry for each example are not cut",
        CUTTING,
        "        if len(batch) == examples and not any(_is_batched(entry, examples) for entry in batch):\n",
        "        if False:\n",
        (*COLLATED, "-k", "check"),
    ),
    Mutant(
        "objects with attributes are not cut",
        CUTTING,
        "    return _cut_object(batch, examples, index)\n",
        "    return batch\n",
        (*COLLATED, "-k", "check"),
    ),
    Mutant(
        "check doesn't try halves",
        CHECKING,
        "    return [each for each in found if each] or [each for each in [test.mixed()] if each]\n",
        "    return [each for each in found if each]\n",
        (*COLLATED, "-k", "check"),
    ),
    Mutant(
        "plain attributes keep examples unseen",
        MIXING_TEST,
        "        if trial.differ(once.losses, after.losses):\n",
        "        if False:\n",
        KEPT_STATE,
    ),
    Mutant(
        "attributes that no loss depends on are refused",
        MIXING_TEST,
        "        if trial.differ(once.losses, after.losses):\n",
        "        if names or trial.differ(once.losses, after.losses):\n",
        (*KEPT_STATE, *OVERLOOKED),
    ),
    Mutant(
        "arrays of numpy keep examples unseen",
        STATE,
        "            if isinstance(value, np.ndarray) and value.dtype.kind in ",
        "            if False and value.dtype.kind in ",
        KEPT_STATE,
    ),
    Mutant(
        "trials leave what they write in plain attributes",
        "ghostclip/clipper/replay.py",
        "[*self.model.buffers(), *_plain_tensors(self.model)]",
        "[*self.model.buffers()]",
        KEPT_STATE,
    ),
    Mutant(
        "gradients that follow the batch where losses don't pass",
        MIXING_TEST,
        "        if self._norms_differ():\n",
        "        if False:\n",
        OVERLOOKED,
    ),
    Mutant(
        "what only copies of rows show passes in float64",
        MIXING_TEST,
        "not getattr(other, test)()\n",
        "not other._moved()\n",
        OVERLOOKED,
    ),
    Mutant(
        "losses that float32 rounded are refused",
        MIXING_TEST,
        "(moved != self._norms_moved and self._is_rounding(moved.__name__))",
        "False",
        OVERLOOKED,
    ),
    Mutant(
        "attributes that change their shapes keep examples unseen",
        STATE,
        "    if one is None or one.is_nested or other.is_nested or one.shape != other.shape:\n        return False\n",
        "    if one is None or one.is_nested or other.is_nested or one.shape != other.shape:\n        return True\n",
        OVERLOOKED,
    ),
    Mutant(
        "frozen parameters keep examples unseen",
        MIXING_TEST,
        "        if first.left.frozen:\n",
        "        if False:\n",
        OVERLOOKED,
    ),
    Mutant(
        "modules that draw keep examples unseen in eval mode",
        TRIAL,
        "            for module in self._quiet if quiet else ():\n",
        "            for module in self._quiet:\n",
        OVERLOOKED,
    ),
    Mutant(
        "trials register buffers for good",
        "ghostclip/clipper/replay.py",
        'OWNED = ("_buffers", "_modules")',
        "OWNED: tuple[str, ...] = ()",
        OVERLOOKED,
    ),
    Mutant(
        "copies of rows have the whole table",
        LOADING,
        "copy.deepcopy(example, {id(tensor): tensor.clone() for _, tensor in tensors_of(example, 0)})",
        "copy.deepcopy(example)",
        OVERLOOKED,
    ),
    Mutant(
        "arrays are not cut",
        CUTTING,
        "        return batch[list(index)] if batch.ndim and len(batch) == examples else batch\n",
        "        return batch\n",
        OVERLOOKED,
    ),
    Mutant(
        "check says nothing where no example is finite",
        CHECKING,
        "    return [] if bool(finite.any()) else",
        "    return [] if True else",
        ("tests/test_data_swap.py",),
    ),
]

UNIT_IDS, USERS = "ghostclip/sampling/unit_ids.py", ("tests/test_unit_ids.py",)
GIVEN_DATA, READABLE = ("tests/test_changing_data.py",), ("tests/test_readable.py",)

AROUND_THE_BATCH = [
    Mutant(
        "tensors of one element are users of their own",
        UNIT_IDS,
        "    if isinstance(user, Tensor) and user.numel() == 1:\n        return user.item()\n",
        "",
        USERS,
    ),
    Mutant(
        "arrays of one element aren't read",
        UNIT_IDS,
        "        return user.reshape(-1)[0]\n",
        "        return user\n",
        USERS,
    ),
    Mutant(
        "of a mapping the keys are the users",
        UNIT_IDS,
        "        return _by_row(unit_ids, rows)\n",
        "        return list(unit_ids)\n",
        USERS,
    ),
    Mutant(
        "a mapping may have other keys than rows",
        UNIT_IDS,
        "    if missing is not None or len(unit_ids) != rows:\n",
        "    if missing is not None:\n",
        USERS,
    ),
    Mutant(
        "objects that hash by identity are users",
        UNIT_IDS,
        "        return hash(other) == hash(user) and bool(other == user)\n",
        "        return True\n",
        USERS,
    ),
    Mutant(
        "singletons that hash by identity are users",
        UNIT_IDS,
        "    if type(user).__hash__ is object.__hash__:\n        return False\n",
        "",
        USERS,
    ),
    Mutant(
        "a part of a user may be NaN",
        UNIT_IDS,
        "        return bool(user != user) or any(_is_missing(part) for part in parts)\n",
        "        return bool(user != user)\n",
        USERS,
    ),
    Mutant(
        "a set names users in its own order",
        UNIT_IDS,
        "isinstance(unit_ids, str | bytes | Set)",
        "isinstance(unit_ids, str | bytes)",
        USERS,
    ),
    Mutant(
        "a data frame's columns are its rows",
        UNIT_IDS,
        "    unit_ids = _flat(unit_ids)\n",
        "",
        USERS,
    ),
    Mutant(
        "Lightning counts users by identity",
        "ghostclip/integrations/lightning/fitting.py",
        "len(set(users_of_rows(users, rows)))",
        "len(set(users))",
        ("tests/test_lightning.py", "-k", "by_value"),
    ),
    Mutant(
        "steps of noise alone are not named",
        RELEASE,
        "        self._readable.saw(result, self.clipper.passes.left_out)\n",
        "",
        READABLE,
    ),
    Mutant(
        "compiled steps of noise alone are not named",
        RELEASE,
        "        self.updates.accept()\n        self._readable.warn()\n\n\ndef",
        "        self.updates.accept()\n\n\ndef",
        ("tests/test_compiled_update.py", "-k", "without_a_finite_example"),
    ),
    Mutant(
        "one example that isn't finite is named as all of them",
        "ghostclip/engine/readable.py",
        "isfinite() for each in vectors]).all(0).any())",
        "isfinite() for each in vectors]).all())",
        READABLE,
    ),
    Mutant(
        "infinite losses of finite norms are finite",
        "ghostclip/engine/readable.py",
        "            vectors += [] if result.losses is None else [result.losses]\n",
        "",
        READABLE,
    ),
    Mutant(
        "a rank says what holds of its own share",
        RELEASE,
        '            self._readable.agree([each["examples, and whether any was finite"] for each in said])\n',
        "",
        READABLE,
    ),
    Mutant(
        "an earlier batch's examples count",
        RELEASE,
        "        self._readable.begin()\n",
        "",
        READABLE,
    ),
    Mutant(
        "an optimizer around another has no hooks",
        "ghostclip/engine/optimizers.py",
        "    Optimizer.__setstate__(optimizer, {})\n",
        "",
        ("tests/test_outer_optimizers.py",),
    ),
    Mutant(
        "a dict of columns is a data set",
        "ghostclip/sampling/loading.py",
        "any(row not in dataset for row in range(len(dataset)))",
        "False",
        GIVEN_DATA,
    ),
    Mutant(
        "a data frame is a data set",
        "ghostclip/sampling/loading.py",
        'hasattr(dataset, "iloc")',
        "False",
        GIVEN_DATA,
    ),
    Mutant(
        "a data set may change its length between batches",
        "ghostclip/sampling/batches.py",
        "        self._plan.check_size()\n        self._plan.owner",
        "        self._plan.owner",
        GIVEN_DATA,
    ),
    Mutant(
        "examples that are gone are an IndexError",
        "ghostclip/sampling/batches.py",
        "            self._plan.check_size()\n            raise\n",
        "            raise\n",
        GIVEN_DATA,
    ),
]

TWICE = ("tests/test_double_backward.py",)
PRECISION = ("tests/test_full_precision.py",)

DIFFERENTIATED_TWICE = [
    Mutant(
        "a gradient behind a recurrent layer has no graph",
        "ghostclip/nn/rnn/recurrence.py",
        "        if torch.is_grad_enabled():  # create_graph=True",
        "        if False:  # create_graph=True",
        (*TWICE, "-k", "float32 and (rnn or lstm or gru)"),
    ),
    Mutant(
        "a recurrence's gradients at its own tensors take in what came before",
        "ghostclip/nn/rnn/differentiable.py",
        "aliases = [None if t is None else t.view_as(t) for t in tensors]",
        "aliases = list(tensors)",
        (*TWICE, "-k", "used_twice"),
    ),
    Mutant(
        "a group's mean depends on its scale",
        "ghostclip/graph/shared/boundary.py",
        "        if self.number and self.node.name() in (LAYER_NORM, GROUP_NORM):\n",
        "        if False:\n",
        (*TWICE, "-k", "float32 and group"),
    ),
    Mutant(
        "an instance normalization's gradients are rounded to the weights' type",
        "ghostclip/nn/normalization.py",
        "self.capture(to_float32(parameter).repeat(examples, 1)",
        "self.capture(parameter.repeat(examples, 1)",
        ("tests/test_layer_rules.py", "-k", "narrow"),
    ),
    Mutant(
        "a once_differentiable backward is a constant",
        "ghostclip/graph/reader.py",
        '    "Error": "the losses contain',
        '    "NoError": "the losses contain',
        (*TWICE, "-k", "without_second"),
    ),
    Mutant(
        "missing second derivatives raise torch's own error",
        FIRST,
        '        if "derivative for" in text and "not implemented" in text:\n',
        "        if False:\n",
        (*TWICE, "-k", "without_second"),
    ),
    Mutant(
        "verify compares wrappers with wrappers",
        "ghostclip/clipper/verify.py",
        "with nullcontext() if clipper.layout.sharded else unwrapped(model):",
        "with nullcontext():",
        (*TWICE, "-k", "verify"),
    ),
    Mutant(
        "norms are measured in the precision that was set",
        "ghostclip/clipper/collector.py",
        "        with full_precision(grad.device):\n",
        "        if True:\n",
        PRECISION,
    ),
    Mutant(
        "kept rows are summed in the precision that was set",
        PASSES,
        "        with full_precision(next(iter(self.weights.values())).device):\n",
        "        if True:\n",
        PRECISION,
    ),
    Mutant(
        "a graph runs in the precision that was set",
        "ghostclip/compiled/region.py",
        "        with full_precision(inputs[0].device):\n",
        "        if True:\n",
        PRECISION,
    ),
    Mutant(
        "steps are compiled where products may round",
        "ghostclip/compiled/clip.py",
        "        if is_narrow(asked.leaves[0].device):\n",
        "        if False:\n",
        PRECISION,
    ),
    Mutant(
        "the first thread to leave puts the precision back",
        "ghostclip/norms/precision.py",
        "            if not _inside and _before is not None:\n",
        "            if _before is not None:\n",
        PRECISION,
    ),
    Mutant(
        "the precision of a device is not put back",
        "ghostclip/norms/precision.py",
        '                _write(backend, "matmul", value)\n',
        "                pass\n",
        PRECISION,
    ),
    Mutant(
        "checkpointed blocks draw other numbers in the second pass",
        PASSES,
        "with nullcontext() if run.random_states is None else run.random_states.again():",
        "with nullcontext():",
        ("tests/test_recomputed.py",),
    ),
    Mutant(
        "generators go on from where a second pass began",
        "ghostclip/clipper/random_states.py",
        "            now._set()\n",
        "            pass\n",
        ("tests/test_recomputed.py",),
    ),
]

MUTANTS = [
    *CLIPPING, *ENGINE, *ACCOUNTING, *SEVERAL_RANKS, *FUZZED, *AROUND, *PROVED, *SHARDED, *MIXED, *COMPILED, *MISUSE,
    *SAME, *WITHIN, *OBSERVED, *INTEGRATED, *CHECKED, *FOLLOWED, *OWNED, *RAGGED_NORMS, *OF_COMPANY, *AROUND_THE_BATCH,
    *DIFFERENTIATED_TWICE,
]  # fmt: skip
