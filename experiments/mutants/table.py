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
        "sink = Reweighting(run.layout, done, sums, add)",
        "means = {owner: each / len(losses) for owner, each in by_owner.items()}\n"
        "                    sink = Reweighting(run.layout, done, replace(sums, weights=means), add)",
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
        "                    sink = Reweighting(run.layout, done, sums, add)\n",
        "                    losses, ones = losses * weights, weights / weights / self.scale\n"
        "                    sums = replace(sums, weights=dict.fromkeys(by_owner, ones))\n"
        "                    sink = Reweighting(run.layout, done, sums, add)\n",
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
        PASSES,
        "delivered = self._are_delivered()",
        "delivered = False",
        ("tests/test_kept_grads.py",),
    ),
    Mutant(
        "a hook of a parameter changes sums that get noise",
        PASSES,
        "        if hooked and self.wide_sums is not None:\n",
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
        "ghostclip/engine/sums.py",
        "self._exact.get(id(p), p.grad).float()",
        "p.grad.float()",
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
        "mixing not looked for",
        "ghostclip/graph/mixing_test.py",
        "        left = [test for test in tests if not test.contradicted]\n",
        "        left = tests\n",
        ("tests/test_mixing.py", "tests/test_pitfalls.py"),
    ),
    Mutant(
        "the self-check compares nothing",
        "ghostclip/self_check/agreement.py",
        "    _refuse(errors, ",
        "    (errors, ",
        ("tests/test_self_check.py",),
    ),
    Mutant(
        "the self-check exchanges nothing",
        COMPARISON,
        "        index = torch.full((len(losses),), self._dice.choice(fine))\n",
        "        index = torch.arange(len(losses))\n",
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
        "if p.requires_grad or p.grad is not None]",
        "if p.grad is not None]",
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
        "            if parameter.grad is not None and bool(torch.count_nonzero(local_part(parameter.grad))):\n",
        "            if False:\n",
        ("tests/test_engine_guards.py",),
    ),
    Mutant(
        "changed sums pass",
        SUMS,
        "if (name := self._changed_since(self._known, self._named)) is not None:\n                raise",
        "if (name := self._changed_since(self._known, self._named)) is None:\n                raise",
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
        "scaled = weights if self.scale == 1.0 else tree_map(lambda each: each / self.scale, weights)",
        "scaled = weights",
        ("tests/test_self_check.py", "-k", "scaled"),
    ),
    Mutant(
        "a narrow number has no float32 sum",
        "ghostclip/clipper/second_pass.py",
        "totals[owner][slice(*rows) if rows else ...] += amount",
        "totals[owner][slice(*rows) if rows else slice(None)] += amount",
        ("tests/test_engine.py", "-k", "single_numbers"),
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
        "ghostclip/interruption.py",
        "        if not is_a_command():\n            raise\n",
        "        raise\n",
        ("tests/test_cli_interrupts.py",),
    ),
]

SHARED_NONFINITE = ("tests/test_nonfinite_shared.py", "-k")
LATE = ("tests/test_first_gradients.py", "-k")
COINCIDING = ("tests/test_coinciding_sizes.py", "-k")
PROVED = [
    Mutant(
        "rows that are not finite count as zeros",
        "ghostclip/graph/mixing_test.py",
        "@ directions).double(), ~finite.all(1), finite, grad.dtype)\n",
        "@ directions).double(), ~finite.all(1) & False, finite, grad.dtype)\n",
        (*SHARED_NONFINITE, "first_batch and positions"),
    ),
    Mutant(
        "rows are held against the largest of all examples",
        "ghostclip/graph/mixing_test.py",
        '        own = scale.scatter_reduce(0, self._owners, self._sizes, "amax")\n',
        "        own = torch.full_like(scale, float(torch.cat([scale, self._sizes]).max()))\n",
        ("tests/test_mixing_scales.py",),
    ),
    Mutant(
        "beside a large example rows in another order look like rounding",
        "ghostclip/graph/mixing_test.py",
        "        return -self.owners, self.harmed,",
        "        return 0, self.harmed,",
        ("tests/test_mixing_scales.py", "-k", "order_of_rows and rows_by_time and dtype2"),
    ),
    Mutant(
        "a row that one large example dominates is its own",
        "ghostclip/graph/mixing_test.py",
        "        return self.shown and self.owners == 1 and self._with_gradients > 1\n",
        "        return False\n",
        ("tests/test_coinciding_sizes.py", "-k", "does_not_own"),
    ),
    Mutant(
        "rows that aren't finite go to an example whose loss is",
        "ghostclip/graph/mixing_test.py",
        "int(finite[spoilt].sum())",
        "len(spoilt)",
        ("tests/test_mixing_scales.py", "-k", "whose_loss_is_not"),
    ),
    Mutant(
        "positions are taken for the examples of which one is large",
        "ghostclip/graph/mixing_test.py",
        "        return -self.owners, self.harmed,",
        "        return 0, self.harmed,",
        ("tests/test_mixing_scales.py", "-k", "order_of_rows and matrix_by_position"),
    ),
    Mutant(
        "a refused batch isn't met with another number of rows",
        FIRST,
        "        return self._grouping.constants > known\n",
        "        return False\n",
        (*COINCIDING, "clip_meets"),
    ),
    Mutant(
        "all rows of a table that isn't known for one are spoilt by one example",
        "ghostclip/graph/row_layout.py",
        "(found[call].spreads and not call.sources) or are_positions",
        "are_positions",
        (*COINCIDING, "not_known_for_one"),
    ),
    Mutant(
        "factors make finite gradients overflow",
        "ghostclip/graph/mixing_test.py",
        "        yield torch.exp2(-(numbers % BASE)",
        "        yield torch.exp2(+(numbers % BASE)",
        ("tests/test_mixing_scales.py",),
    ),
    Mutant(
        "a table without finite rows is the examples' own",
        "ghostclip/graph/row_layout.py",
        "        if not mixing:\n            return dark\n",
        "        if not mixing:\n            return []\n",
        (*SHARED_NONFINITE, "first_batch and positions"),
    ),
    Mutant(
        "what all share is an example's where nothing is finite",
        "ghostclip/graph/shared/search.py",
        "        if not verdict.shown and may_be_shared and (verdict.reached or verdict.unclear or best is None):",
        "        if may_be_shared and best is None:",
        (*SHARED_NONFINITE, "first_batch and (index or gain)"),
    ),
    Mutant(
        "faint gradients of a table are an example's",
        "ghostclip/graph/shared/search.py",
        "(verdict.reached or verdict.unclear or best is None):",
        "(verdict.unclear or best is None):",
        ("tests/test_mixing_scales.py", "-k", "table_of_faint"),
    ),
    Mutant(
        "a row that follows its factor shows all others",
        "ghostclip/graph/mixing_test.py",
        "self.owners > 1 and bool((self._follow == (self._sizes > 0)).all())",
        "self.owners > 1",
        ("tests/test_mixing_scales.py", "-k", "prove_nothing"),
    ),
    Mutant(
        "rows of a weight-normed layer are taken for one position",
        "ghostclip/norms/computed.py",
        "        if self.inner.left.shape[1] != 1:\n            return None\n",
        "",
        ("tests/test_computed_weights.py",),
    ),
    Mutant(
        "a normalised weight's gradient keeps its length",
        "ghostclip/norms/computed.py",
        "across = whole - (right @ self.factor.unit.flatten(1).mT).square()",
        "across = whole - 0 * (right @ self.factor.unit.flatten(1).mT).square()",
        ("tests/test_computed_weights.py", "-k", "linear_layers"),
    ),
    Mutant(
        "a pruned weight's gradient is not masked",
        "ghostclip/norms/computed.py",
        "        return gradients * self.factor\n",
        "        return gradients\n",
        ("tests/test_computed_weights.py", "-k", "linear_layers"),
    ),
    Mutant(
        "a normalised weight's lost digits are not measured again",
        "ghostclip/norms/computed.py",
        "        if bool(lost.any()):\n",
        "        if False:\n",
        ("tests/test_computed_weights.py", "-k", "along_the_direction"),
    ),
    Mutant(
        "a batch without a finite example is refused",
        "ghostclip/graph/row_layout.py",
        "            if search.dark or unsure:\n",
        "            if unsure:\n",
        (*SHARED_NONFINITE, "no_example_is_finite"),
    ),
    Mutant(
        "a frozen gain counts as data",
        "ghostclip/graph/shared/search.py",
        ">= constants:\n",
        "> len(kept):\n",
        (*SHARED_NONFINITE, "trains_at_one_size and gain"),
    ),
    Mutant(
        "first gradients go unnoticed",
        "ghostclip/graph/row_layout.py",
        "        return bool(self._arrived) and ",
        "        return bool(self._arrived) and False and ",
        (*LATE, "switched_on_late"),
    ),
    Mutant(
        "a new way is not looked at in layers that are proved",
        "ghostclip/graph/row_layout.py",
        "keys, examples, uses.reorders or rehearsal or reached)",
        "keys, examples, uses.reorders or rehearsal)",
        (*LATE, "switched_on_late"),
    ),
    Mutant(
        "a branch that stays off is proved again at every batch",
        "ghostclip/graph/row_layout.py",
        "self._tried.get(keys[call], 0)) for call in pending}",
        "self._tried.get(keys[call], 0)) for call in ()}",
        (*LATE, "stays_off"),
    ),
    Mutant(
        "steps are compiled before gradients reach all layers",
        "ghostclip/clipper/first_pass.py",
        "self.is_open = layout.calls, layout.check, not layout.proved\n",
        "self.is_open = layout.calls, None, False\n",
        (*LATE, "compiled"),
    ),
    Mutant(
        "what is spoilt in part only is the examples' own",
        "ghostclip/graph/shared/search.py",
        "        if not verdict.shown and may_be_shared and (verdict.reached or verdict.unclear or best is None):",
        "        if not verdict.shown and may_be_shared and (best is None or best.spoilt == len(self._losses)):",
        (*COINCIDING, "all_sizes and stack"),
    ),
    Mutant(
        "rounding below the smallest normal number counts as mixing",
        "ghostclip/graph/mixing_test.py",
        "bool((off & (sizes > self._floor)).any())\n",
        "True\n",
        (*COINCIDING, "denormal"),
    ),
    Mutant(
        "a shape that another size had too is forgotten",
        "ghostclip/graph/row_layout.py",
        "                self._constant |= ",
        "                _ = ",
        (*COINCIDING, "another_size"),
    ),
    Mutant(
        "an entry of each row of a table is no table",
        "ghostclip/graph/shared/positions.py",
        "    return node.name() == SELECT and ",
        "    return False and ",
        (*COINCIDING, "all_sizes and bias"),
    ),
    Mutant(
        "what was expanded to pairs of examples has positions",
        "ghostclip/graph/shared/positions.py",
        "    return own == whole if name in ELEMENTWISE | REPEATING else len(own) >= max(3, len(whole))\n",
        "    return name in ELEMENTWISE | REPEATING or len(own) >= max(3, len(whole))\n",
        (*COINCIDING, "pairs and expand and True"),
    ),
    Mutant(
        "what any operation repeated to pairs of examples has positions",
        "ghostclip/graph/shared/positions.py",
        "    return own == whole if name in ELEMENTWISE | REPEATING else len(own) >= max(3, len(whole))\n",
        "    return own == whole if name in ELEMENTWISE | REPEATING else True\n",
        (*COINCIDING, "pairs and (stack or index) and True"),
    ),
    Mutant(
        "scores of pairs are positions",
        "ghostclip/graph/shared/positions.py",
        "len(own) >= max(3, len(whole))\n",
        "len(own) >= len(whole)\n",
        (*COINCIDING, "scores_of_pairs"),
    ),
    Mutant(
        "classes are positions",
        "ghostclip/graph/shared/positions.py",
        "            if call.shape[call.batch_dim] > examples or len(call.shape) > 2:\n                return True\n",
        "            return True\n",
        (*COINCIDING, "as_many_classes"),
    ),
    Mutant(
        "a batch too small to tell settles what keeps examples apart",
        "ghostclip/graph/mixing_test.py",
        "        self.unclear = self.spoilt or any(test.faint for test in shown or left)\n",
        "        self.unclear = self.spoilt\n",
        (*COINCIDING, "too_small_to_tell and False"),
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
        "            return int(self._dice.random() < 1.0 / SELDOM)\n",
        "            return 0\n",
        (*COMPARED, "-k", "how_often or later"),
    ),
    Mutant(
        "losses divided by the number of examples pass",
        COMPARISON,
        "        if trial.batch.divisible and self._depends_on_number(",
        "        if False and self._depends_on_number(",
        (*COMPARED, "-k", "over_their_number"),
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
        COMPARISON,
        "        for _ in range(TOSSES):\n",
        "        for _ in range(0):\n",
        (*COMPARED, "-k", "honest and every"),
    ),
    Mutant(
        "dropout that falls elsewhere is refused",
        COMPARISON,
        "            trial.quieten()\n            if any",
        "            if any",
        (*COMPARED, "-k", "honest and dropout"),
    ),
    Mutant(
        "random numbers by the data are refused",
        COMPARISON,
        "        if trial.draws and not self._draws_alike(",
        "        if False and not self._draws_alike(",
        (*COMPARED, "-k", "honest and drawn"),
    ),
    Mutant(
        "ragged examples are refused",
        "ghostclip/self_check/batch_rows.py",
        "if own and (all(dims) or real)}",
        "if own}",
        (*COMPARED, "-k", "honest or taken"),
    ),
    Mutant(
        "features are taken for examples",
        "ghostclip/self_check/batch_rows.py",
        "(len(self._sizes) < 2 and not all(0 in dims for dims in self._dims))",
        "False",
        (*COMPARED, "-k", "dimension"),
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
        COMPARISON,
        "        if swaps:\n",
        "        if False:\n",
        ("tests/test_self_check.py",),
    ),
]

EXCHANGED = ("tests/test_replaced_layers.py",)
KEYS = ("tests/test_compiled_keys.py",)
IN_GRAPHS = ("tests/test_compiled_rounding.py", "-m", "not slow")
COMPILED = [
    Mutant(
        "what was proved of a layer holds for what takes its place",
        "ghostclip/graph/reader.py",
        "(len(seen), index.version)",
        "(len(seen), 0)",
        EXCHANGED,
    ),
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
        "ghostclip/graph/reader.py",
        "- (1 << 63)) % max(1, total) for dim",
        "- (1 << 63)) for dim",
        ("tests/test_mixing.py", "-k", "order_that_changes"),
    ),
    Mutant(
        "a proof is not repeated on a larger batch",
        "ghostclip/graph/row_layout.py",
        "if anew or examples >= 2 * self._tried.get(key, 0)]",
        "if anew or key not in self._tried]",
        ("tests/test_mixing.py", "-k", "twice_as_large"),
    ),
    Mutant(
        "proofs of trials are believed",
        "ghostclip/engine/micro_batching.py",
        "with clipper.passes.forgetting(), gradients_aside(trained):",
        "with gradients_aside(trained):",
        ("tests/test_auto_physical.py", "-k", "copies"),
    ),
    Mutant(
        "a loss function may fill gradients in a compiled step",
        "ghostclip/clipper/clipper.py",
        "        self._guard.check(trained)  # the loss function ran meanwhile\n",
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
        "trials of sizes leave their gradients",
        "ghostclip/engine/micro_batching.py",
        "with clipper.passes.forgetting(), gradients_aside(trained):",
        "with clipper.passes.forgetting():",
        ("tests/test_auto_physical.py", "-k", "trace"),
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

TRACE, TRACED = "ghostclip/traces/steps.py", ("tests/test_trace.py",)

OBSERVED = [
    Mutant(
        "a trace leaves unclipped sums in the gradients",
        PASSES,
        "self._sum(losses, run, weights, finite, True, partial(self._gather, totals))",
        "self._sum(losses, run, weights, finite, True, self._add)",
        (*TRACED, "-k", "bit_for_bit"),
    ),
    Mutant(
        "an example that is not finite is in a trace's sums",
        PASSES,
        "self._sum(losses, run, weights, finite, True, partial(self._gather, totals))",
        "self._sum(losses, run, torch.ones_like(some), None, True, partial(self._gather, totals))",
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
        '            if kind.__name__ == "CompiledFunctionBackward":\n',
        '            if kind.__name__ == "Compiled":\n',
        ("tests/test_torch_compile.py",),
    ),
    Mutant(
        "norms in one call leave the model wrapped",
        "ghostclip/wrap.py",
        "            module.__class__ = kind\n",
        "",
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
        "later ragged batches aren't compared with their index",
        "ghostclip/graph/ragged_layout.py",
        "        elif len(losses) > 1:\n            check = IndexCheck(",
        "        elif len(losses) < 1:\n            check = IndexCheck(",
        ("tests/test_ragged_mistakes.py",),
    ),
    Mutant(
        "a weight normalization's direction keeps what lies along it",
        "ghostclip/norms/computed.py",
        "        across = torch.addcmul(gradients, self.of_g(gradients), self.unit, value=-1.0)\n",
        "        across = gradients.clone()\n",
        ("tests/test_computed_weights.py",),
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
        "            self._lost = self._begun\n",
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
        "            if own[name].keys() != before.keys():\n",
        "            if False:\n",
        ("tests/test_self_check.py",),
    ),
    Mutant(
        "a batch of another size goes into a parameter's size, too",
        "ghostclip/clipper/replay.py",
        "    return next(prime for prime in primes if all(size % prime for size in sizes))\n",
        "    return next(primes)\n",
        ("tests/test_coinciding_sizes.py",),
    ),
    Mutant(
        "any tensor of a rehearsal is shared",
        "ghostclip/graph/shared/search.py",
        "        if self._places.rehearses and not dims:\n",
        "        if self._places.rehearses:\n",
        ("tests/test_coinciding_sizes.py", "tests/test_mixing.py", "tests/test_fallback.py"),
    ),
    Mutant(
        "a normalization's scale outside of layers gets the shift's gradient",
        "ghostclip/graph/shared/boundary.py",
        "            grad = grad * ((x - mean) * rstd).view_as(grad)\n",
        "            pass\n",
        ("tests/test_layers.py", "-k", "group_norm"),
    ),
    Mutant(
        "check takes no norms of its batch",
        "ghostclip/clipper/checking.py",
        "        findings += _refusal(model, loss_fn, batch)\n",
        "        pass\n",
        LINES,
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
        "a row that two examples use is the first one's",
        PICKED,
        "if len(other) != len(first) or bool(",
        "if len(other) != len(first) or False and bool(",
        PICKS,
    ),
    Mutant(
        "a place that two examples pick is the last one's",
        PICKED,
        "        if not torch.equal(found[index[used]], owners[used]):",
        "        if False:",
        PICKS,
    ),
    Mutant(
        "rows are followed wherever they are used otherwise",
        PICKED,
        "        if len(told) < self._uses[node]:",
        "        if False:",
        PICKS,
    ),
    Mutant(
        "operations along the rows count as others",
        PICKED,
        "(name in ALONG and not _is_along_rows(node, len(owners)))",
        "name in ALONG",
        PICKS,
    ),
    Mutant(
        "what rows are put back to isn't tested",
        PICKED,
        "            if len(losses) < 2 * self._tested.get(key, 0):",
        "            if True:",
        EXPERTS,
    ),
    Mutant(
        "rows that come from outside of the graph are followed",
        PICKED,
        "        if not call.sources:\n",
        "        if False:\n",
        PICKS,
    ),
    Mutant(
        "a mask picks the rows before it",
        PICKED,
        "masks[0].nonzero()[:, 0] if masks",
        "(masks[0].nonzero()[:, 0] - 1) if masks",
        EXPERTS,
    ),
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

MUTANTS = [
    *CLIPPING, *ENGINE, *ACCOUNTING, *SEVERAL_RANKS, *FUZZED, *AROUND, *PROVED, *SHARDED, *MIXED, *COMPILED, *MISUSE,
    *SAME, *OBSERVED, *INTEGRATED, *CHECKED, *FOLLOWED,
]  # fmt: skip
