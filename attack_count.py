import sys, warnings, torch
warnings.simplefilter("ignore")
from attack_programs import *
# how often a measured batch of new clippers is accepted, and what one example can do to the sum
def share(make_loss, batch, build, n=60):
    acc = 0
    for k in range(n):
        torch.manual_seed(0); m = build(); c = ghostclip.GhostClipper(m, 1.0)
        try: c.backward(make_loss(m, *batch)); acc += 1
        except ghostclip.UnsupportedModelError: pass
    return acc / n
torch.manual_seed(1)
for p in (4, 5, 6, 8, 10, 12):
    for B in (2, 6, 64):
        w = torch.ones(B); w[0] = 10.0**p
        print("1e%d B=%d accepted" % (p, B), share(weighted, (X(B), w), lambda: Two(lambda s, h: h + h[:1])), flush=True)
# sensitivity: clipped sum with example 0 and without it (h + h[:1] -> next example is the first)
torch.manual_seed(1)
for B in (6, 64):
    x = X(B) * 3; w = torch.ones(B) * 10; w[0] = 1e12; x[0] = 40.
    def total(x, w):
        while True:
            torch.manual_seed(0); m = Two(lambda s, h: h + h[:1] * 5); c = ghostclip.GhostClipper(m, 1.0)
            try: c.backward(weighted(m, x, w)); return grads(m)
            except ghostclip.UnsupportedModelError: pass
    a = total(x, w); y = x.clone(); y[0] = -40.; b = total(y, w)
    print("B", B, "one example replaced moves the sum by", float((a - b).norm()), "allowed 2", flush=True)
