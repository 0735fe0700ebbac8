"""Engine, compile, users, norms() and per_example_grads() after the layout changed."""
import warnings, torch, torch.nn.functional as F
from torch import nn
import ghostclip
warnings.simplefilter("ignore"); torch.set_num_threads(1)
from attack_programs import Two, X, square, solved, loop, conv, T, i2, s2
import sys
def say(*a): print(*a, flush=True)

# norms() and per_example_grads(): no marks, no alarm, no check
for second in ("cached", "reweight"):
    torch.manual_seed(0)
    m = Two(lambda s, h, i: h.view(2, 3, 6)[i].reshape(6, 6)); c = ghostclip.GhostClipper(m, 1.0, second_pass=second)
    for k, i in enumerate((i2, i2, s2)):
        x = X()
        g = loop(m, square(m, x, i)).norm(dim=1)
        try: n = c.norms(square(m, x, i)); say("norms()", second, k, float(((n - g).abs() / g).max()))
        except Exception as e: say("norms()", second, k, type(e).__name__)
# compile
for name, make in {"convolution over the batch": lambda: (Two(conv), [T([0., 1, 0])] * 8 + [T([0., 0, 1])] * 8)}.items():
    torch.manual_seed(0); m, ks = make()
    try:
        c = ghostclip.GhostClipper(m, 1.0, compile=True)
        out = ""
        for k in ks:
            x = X(64)
            g = loop(m, square(m, x, k)).norm(dim=1)
            m.zero_grad()
            try:
                n = c.clip(lambda mm, b: square(mm, b[0], b[1][0]), (x, k.expand(64, 3))).norms
                e = float(((n - g).abs() / g).max()); out += "E" if e < 1e-4 else "W"
            except ghostclip.UnsupportedModelError as e: out += "R"
        say("compile", name, out, c.compiled.refusals if hasattr(c.compiled, "refusals") else "")
    except Exception as e: say("compile", name, type(e).__name__, str(e)[:300])
# engine: second physical batch refused
torch.manual_seed(0)
m = Two(lambda s, h, a: h + a.mean() * h.roll(1, 0)); opt = torch.optim.SGD(m.parameters(), 1.0)
data = [(torch.randn(5), float(i >= 24)) for i in range(32)]
for mode in ("step", "backward"):
    eng = ghostclip.PrivacyEngine(m, opt, data, batch_size=32, max_physical_batch_size=8, noise_multiplier=0.0, target_delta=1e-5, clipping=1.0, noise="test", seed=0, self_check=False)
    before = [p.detach().clone() for p in m.parameters()]
    try:
        for b in eng.batches():
            n = 0
            for x, a in (b.physical() if mode == "backward" else ()):
                al = torch.zeros(len(x)) if n < 2 else torch.ones(len(x)); n += 1
                try: eng.backward(square(m, x, al))
                except ghostclip.UnsupportedModelError as e: say("engine.backward refused physical", n, str(e)[:80])
            if mode == "step":
                k = {"n": 0}
                def lf(mm, bb):
                    k["n"] += 1; return square(mm, bb[0], torch.zeros(len(bb[0])) if k["n"] < 3 else torch.ones(len(bb[0])))
                try: eng.step(b, lf)
                except ghostclip.UnsupportedModelError as e: say("engine.step refused", k, str(e)[:80])
                continue
            try: opt.step(); say("stepped; moved", max(float((p - q).abs().max()) for p, q in zip(m.parameters(), before)))
            except Exception as e: say("opt.step:", type(e).__name__, str(e)[:150])
            opt.zero_grad()
        say(mode, "moved at end", max(float((p - q).abs().max()) for p, q in zip(m.parameters(), before)), [p.grad is None for p in m.parameters()])
    except Exception as e: say("engine", mode, type(e).__name__, str(e)[:200])
    opt = torch.optim.SGD(m.parameters(), 1.0)
