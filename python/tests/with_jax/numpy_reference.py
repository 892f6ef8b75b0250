"""The mLSTM token by token in float64 numpy, with its gradient written out: shares nothing with what it judges."""

from __future__ import annotations

import numpy as np


def _log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def _sigmoid(x):
    return np.exp(_log_sigmoid(x))


def _gates(i, f, gate, soft_cap):
    """log i, log f and their derivatives by the raw gates."""
    di, df = np.ones_like(i), np.ones_like(f)
    if soft_cap is not None:
        ti, tf = np.tanh(i / soft_cap), np.tanh(f / soft_cap)
        di, df, i, f = 1 - ti**2, 1 - tf**2, soft_cap * ti, soft_cap * tf
    if gate == "sigmoid":
        di, i = di * _sigmoid(-i), _log_sigmoid(i)
    if gate != "log":
        df, f = df * _sigmoid(-f), _log_sigmoid(f)
    return i, f, di, df


class Mlstm:
    """One sequence and head: q, k (T,dqk)  v (T,dhv)  i, f (T,)."""

    def __init__(self, q, k, v, i, f, state, *, gate, normalizer, qk_scale, eps, soft_cap, exact):
        self.q, self.k, self.v = q, k, v
        self.scale = q.shape[1] ** -0.5 if qk_scale is None else qk_scale
        self.exact, self.maximum = exact, (normalizer or ("max" if gate == "exp" else "none")) == "max"
        log_i, log_f, self.i_slope, self.f_slope = _gates(i, f, gate, soft_cap)
        tokens = len(q)
        C, n, m = state
        self.C, self.n = [C], [n]
        self.decay, self.weight, self.den, self.qn = (np.ones(tokens) for _ in range(4))
        self.floor = np.zeros(tokens)
        self.h = np.zeros_like(v)
        for t in range(tokens):
            following = max(log_f[t] + m, log_i[t]) if gate == "exp" else 0.0
            self.decay[t], self.weight[t] = np.exp(log_f[t] + m - following), np.exp(log_i[t] - following)
            m = following
            C = self.decay[t] * C + self.weight[t] * np.outer(k[t], v[t])
            n = self.decay[t] * n + self.weight[t] * k[t]
            self.C.append(C)
            self.n.append(n)
            self.qn[t], self.floor[t] = self.scale * q[t] @ n, np.exp(-m)
            if self.maximum:
                self.den[t] = max(abs(self.qn[t]), self.floor[t]) + eps
            self.h[t] = self.scale * q[t] @ C / self.den[t]
        self.state = (C, n, m)

    def backward(self, dh, dC, dn):
        """Gradients of q, k, v, i, f and of C and n of the first state; those of the last are taken at its own m."""
        dq, dk, dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)
        di, df = np.zeros(len(self.q)), np.zeros(len(self.q))
        for t in reversed(range(len(self.q))):
            numerator = dh[t] / self.den[t]
            active = self.exact and self.maximum and abs(self.qn[t]) > self.floor[t]
            deta = -np.sign(self.qn[t]) * (dh[t] @ self.h[t]) / self.den[t] if active else 0.0
            dq[t] = self.scale * (self.C[t + 1] @ numerator + deta * self.n[t + 1])
            dC = dC + self.scale * np.outer(self.q[t], numerator)
            dn = dn + self.scale * deta * self.q[t]
            dk[t] = self.weight[t] * (dC @ self.v[t] + dn)
            dv[t] = self.weight[t] * (dC.T @ self.k[t])
            di[t] = self.k[t] @ dk[t] * self.i_slope[t]
            df[t] = self.decay[t] * ((self.C[t] * dC).sum() + self.n[t] @ dn) * self.f_slope[t]
            dC, dn = self.decay[t] * dC, self.decay[t] * dn
        return dq, dk, dv, di, df, dC, dn


def mlstm(q, k, v, i, f, state=None, dh=None, dstate=None, cu_seqlens=None, **options):
    """Results of a whole call in the layout (B,T,H,D): h, (C, n, m) and, given dh, the gradients as a dict."""
    defaults = {"gate": "exp", "normalizer": None, "qk_scale": None, "eps": 1e-6, "soft_cap": None, "exact": False}
    options = defaults | options
    q, k, v, i, f = (np.asarray(x, np.float64) for x in (q, k, v, i, f))
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    bounds = None if cu_seqlens is None else [int(x) for x in cu_seqlens]
    rows = (
        [(b, 0, v.shape[1]) for b in range(v.shape[0])]
        if bounds is None
        else [(0, start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    )
    shape = (len(rows), heads, q.shape[3], v.shape[3])
    zeros = [np.zeros(shape[:axes]) for axes in (4, 3, 2)]
    first = zeros if state is None else [np.asarray(x, np.float64) for x in state]
    dlast = zeros[:2] if dstate is None else [np.asarray(x, np.float64) for x in dstate]
    h, last = np.zeros_like(v), [np.zeros(s.shape) for s in zeros]
    grads = {name: np.zeros_like(x) for name, x in zip("qkvif", (q, k, v, i, f), strict=True)}
    grads |= {"C": np.zeros(shape), "n": np.zeros(shape[:3])}
    for s, (b, start, end) in enumerate(rows):
        for head in range(heads):
            tokens, shared = (b, slice(start, end), head), (b, slice(start, end), head // group)
            run = Mlstm(q[shared], k[shared], v[tokens], i[tokens], f[tokens], [x[s, head] for x in first], **options)
            h[tokens] = run.h
            for whole, part in zip(last, run.state, strict=True):
                whole[s, head] = part
            if dh is not None:
                parts = run.backward(np.asarray(dh, np.float64)[tokens], dlast[0][s, head], dlast[1][s, head])
                for name, part in zip(("q", "k", "v", "i", "f", "C", "n"), parts, strict=True):
                    place = shared if name in "qk" else tokens if name in "vif" else (s, head)
                    grads[name][place] += part
    return h, tuple(last), grads


def relative_error(actual, expected) -> float:
    """||actual - expected|| / ||expected||; NaN where either has one, so that no bound holds."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    size = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (size if size > 0 else 1))
