// The explorer: what a noise schedule spends, computed in the page. No network, no library.
// `numerics` is pure; it runs in the page (claims, RDP) and in a worker (PLD, attacks).
// Every function follows the Python of the same name in dp_companion.budgets.
(function () {
"use strict";

function numerics() {
  const exp = Math.exp, log = Math.log, sqrt = Math.sqrt;
  const add = (a, b) => { // ln(e^a + e^b)
    const top = Math.max(a, b);
    return top === -Infinity ? top : top + Math.log1p(exp(Math.min(a, b) - top));
  };
  const sum = values => values.reduce((a, b) => a + b, 0);

  // --- The normal distribution (Cody 1969) ------------------------------------------------
  const A = [1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2,
             3.77485237685302021e2, 3.20937758913846947e3];
  const B = [1, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
             2.84423683343917062e3];
  const C = [2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594,
             6.61191906371416295e1, 2.98635138197400131e2, 8.81952221241769090e2,
             1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3];
  const D = [1, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2,
             1.62138957456669019e3, 3.29079923573345963e3, 4.36261909014324716e3,
             3.43936767414372164e3, 1.23033935480374942e3];
  const P = [1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1,
             1.25781726111229246e-1, 1.60837851487422766e-2, 6.58749161529837803e-4];
  const Q = [1, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1,
             6.05183413124413191e-2, 2.33520497626869185e-3];

  function polynomial(coefficients, x) {
    let value = 0;
    for (let i = 0; i < coefficients.length; i++) value = value*x + coefficients[i];
    return value;
  }

  function scaled(y) { // e^(y^2) erfc(y), for y > 0.46875
    const z = 1/(y*y);
    return y <= 4 ? polynomial(C, y)/polynomial(D, y)
      : (1/sqrt(Math.PI) - z*polynomial(P, z)/polynomial(Q, z))/y;
  }

  function erfc(x) {
    const y = Math.abs(x);
    if (y > 27) return x < 0 ? 2 : 0;
    if (y <= 0.46875) return 1 - x*polynomial(A, y*y)/polynomial(B, y*y);
    const cut = Math.trunc(16*y)/16; // e^(-y^2) without cancellation
    const tail = exp(-cut*cut)*exp(-(y - cut)*(y + cut))*scaled(y);
    return x < 0 ? 2 - tail : tail;
  }

  const ndtr = z => erfc(-z/Math.SQRT2)/2;

  function ndtri(p) { // Newton's steps on ln Phi, from a rough start
    if (!(p > 0)) return -Infinity;
    if (!(p < 1)) return Infinity;
    if (p > 0.5) return -ndtri(1 - p);
    let z = p < 0.02 ? -sqrt(Math.max(0.1, -2*log(p) - log(-2*log(p)*6.283))) : (p - 0.5)*2.6;
    for (let i = 0; i < 60; i++) {
      const here = ndtr(z);
      const move = (log(here) - log(p))*here*sqrt(2*Math.PI)*exp(z*z/2);
      z -= Math.max(-1, Math.min(1, move));
      if (Math.abs(move) < 1e-13*Math.abs(z)) break;
    }
    return z;
  }

  // --- Schedules and events (budgets/schedules, budgets/events) ---------------------------
  function varianceFactor(s, epoch) {
    if (s.decay === "linear") return Math.pow(s.rate, epoch);
    if (s.decay === "time") return 1/(1 + s.rate*epoch);
    if (s.decay === "step") return Math.pow(s.rate, Math.floor(epoch/s.drop));
    return 1;
  }

  const multiplierAt = (s, epoch) => s.sigma*sqrt(varianceFactor(s, epoch));
  const stepsOf = s => Math.floor(s.epochs*s.n/s.batch);

  function eventsOf(s) {
    const events = [], q = s.batch/s.n, total = stepsOf(s);
    const first = epoch => Math.min(Math.ceil(epoch*s.n/s.batch), total);
    for (let epoch = 0; epoch < s.epochs; epoch++) {
      const sigma = multiplierAt(s, epoch), steps = first(epoch + 1) - first(epoch);
      const last = events[events.length - 1];
      if (!steps) continue;
      if (last && last.sigma === sigma) last.steps += steps;
      else events.push({sigma, q, steps});
    }
    return events;
  }

  function mergeEvents(events, atMost) { // one rate only: that of a plan
    const least = Math.min(...events.map(e => e.sigma));
    const most = Math.max(...events.map(e => e.sigma)), found = new Map();
    const many = new Set(events.map(e => e.sigma)).size > atMost;
    const width = Math.max(log(most/least), 1e-9)/(atMost - 1);
    for (const e of events) {
      const low = least*exp(width*Math.floor(log(e.sigma/least)/width));
      const sigma = many ? Math.min(e.sigma, low) : e.sigma;
      found.set(sigma, (found.get(sigma) || 0) + e.steps);
    }
    return [...found].map(([sigma, steps]) => ({sigma, q: events[0].q, steps}));
  }

  // --- Renyi DP (budgets/rdp) -------------------------------------------------------------
  const ORDERS = (() => {
    const orders = [];
    for (let i = -120; i < 0; i++) orders.push(1 + Math.pow(10, i/20));
    for (let x = 1; x < 100; x++) orders.push(1 + x/10);
    for (let x = 11; x < 65; x++) orders.push(x);
    orders.push(80, 96, 128, 160, 192, 256, 384, 512, 768, 1024);
    return [...new Set(orders)].sort((a, b) => a - b);
  })();
  const OPACUS_ORDERS = ORDERS.filter(a => a > 1.05 && a < 63.5 && a !== 11
    && (a > 11 || Math.abs(a*10 - Math.round(a*10)) < 1e-9));
  const LOG_FACTORIAL = new Float64Array(1025);
  for (let k = 2; k < 1025; k++) LOG_FACTORIAL[k] = LOG_FACTORIAL[k - 1] + log(k);

  function wholeExcess(sigma, q, order) { // ln(A - 1) at a whole order (MTZ19)
    const terms = new Float64Array(order - 1);
    let top = -Infinity;
    for (let k = 2; k <= order; k++) {
      const y = k*(k - 1)/(2*sigma*sigma);
      const grown = y > 1 ? y + Math.log1p(-exp(-y)) : log(Math.expm1(y));
      const choose = LOG_FACTORIAL[order] - LOG_FACTORIAL[k] - LOG_FACTORIAL[order - k];
      const term = choose + k*log(q) + (order - k)*Math.log1p(-q) + grown;
      terms[k - 2] = term;
      if (term > top) top = term;
    }
    let total = 0;
    for (let k = 0; k < terms.length; k++) total += exp(terms[k] - top);
    return top + log(total);
  }

  function rest(y) { // e^y - 1 - y
    if (Math.abs(y) >= 0.05) return Math.expm1(y) - y;
    return y*y*(1/2 + y*(1/6 + y*(1/24 + y*(1/120 + y*(1/720 + y*(1/5040 + y/40320))))));
  }

  function lossAt(x, sigma, q) { // at the output sigma*x
    const ratio = x/sigma - 1/(2*sigma*sigma);
    if (ratio < 1) return Math.log1p(q*Math.expm1(ratio));
    return add(Math.log1p(-q), log(q) + ratio);
  }

  function windowExcess(left, nodes, h, order, sigma, q) { // trapezoidal rule
    const t = order - 1, weight = new Float64Array(nodes), loss = new Float64Array(nodes);
    let top = -Infinity, total = 0;
    for (let i = 0; i < nodes; i++) {
      const x = left + i*h;
      loss[i] = lossAt(x, sigma, q);
      weight[i] = loss[i] - x*x/2;
      top = Math.max(top, weight[i] + Math.max(t*loss[i], 0));
    }
    for (let i = 0; i < nodes; i++) {
      const y = t*loss[i], shared = exp(weight[i] - top);
      const growth = Math.abs(y) < 0.05 ? rest(y)*shared
        : exp(weight[i] + y - top) - (1 + y)*shared;
      total += growth + t*rest(-loss[i])*shared;
    }
    return top + log(total*h/sqrt(2*Math.PI));
  }

  function fractionalExcess(sigma, q, order) { // ln(A - 1) at any order
    const reach = 9, bend = sigma*(Math.log1p(-q) - log(q)) + 1/(2*sigma);
    const d = Math.min(Math.PI*sigma, 7.75);
    const faded = Math.max(0, bend*Math.abs(bend)/2 + log(q));
    const h = Math.min(0.8, 2*Math.PI*d/Math.max(30 + d*d/2 - faded, 1e-9));
    const end = reach + Math.max(0, Math.min(2/sigma, bend)), centre = order/sigma;
    const nodes = Math.ceil((end + reach)/h), more = Math.ceil(2*reach/h);
    if (centre <= end + reach) return windowExcess(-reach, nodes + more, h, order, sigma, q);
    return add(windowExcess(-reach, nodes, h, order, sigma, q),
               windowExcess(centre - reach, more, h, order, sigma, q));
  }

  function rdpAt(event, order) { // nats, of one release
    const {sigma, q} = event;
    if (q === 1 || sigma < 1e-6) return order/(2*sigma*sigma);
    const excess = Number.isInteger(order) ? wholeExcess(sigma, q, order)
      : fractionalExcess(sigma, q, order);
    return add(0, excess)/(order - 1);
  }

  // Epsilon falls and then rises with the order: (order - 1) R is convex. So a search by
  // halves finds the least without asking every order.
  function rdpEpsilon(events, delta, orders = ORDERS) {
    const merged = mergeEvents(events, 1000), known = new Map();
    const total = i => {
      if (!known.has(i)) known.set(i, sum(merged.map(e => e.steps*rdpAt(e, orders[i]))));
      return known.get(i);
    };
    const at = i => {
      const t = orders[i] - 1;
      return total(i) + log(t/orders[i]) - (log(delta) + log(orders[i]))/t;
    };
    if (delta*delta >= -Math.expm1(-total(0))) return {epsilon: 0, order: orders[0]};
    let low = 0, high = orders.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at(middle) <= at(middle + 1)) high = middle; else low = middle + 1;
    }
    return {epsilon: Math.max(0, at(low)), order: orders[low]};
  }

  // --- What the papers claim (budgets/tcdp, budgets/decayed) ------------------------------
  const condition = (name, value, bound, holds) => ({name, value, bound, holds});

  function amplified(rho, q) { // global_adapt_v2, Lemma 4, of one Gaussian release
    const third = 3*rho*(2 - log(rho)), inverse = -log(q);
    return {rho: 13*q*q*rho, omega: inverse/(4*rho), conditions: [
      condition("rho of a release <= 0.1", rho, 0.1, rho <= 0.1),
      condition("sample rate <= 0.1", q, 0.1, q <= 0.1),
      condition("log(1/q) >= 3 rho (2 + log(1/rho))", inverse, third, inverse >= third),
      condition("omega of a release >= log(1/q)/(2 rho)", Infinity, inverse/(2*rho), true)]};
  }

  function tcdpEpsilon(rho, omega, delta) { // Lemma 3
    const L = -log(delta);
    if (rho === 0) return 0;
    if (L <= (omega - 1)**2*rho) return rho + 2*sqrt(rho*L);
    return rho*omega + L/(omega - 1);
  }

  const geometricSum = (rate, terms) => Math.expm1(-terms*log(rate))/(1/rate - 1);

  function precisionSum(s) { // Table 2
    if (s.decay === "linear") return geometricSum(s.rate, s.epochs);
    if (s.decay === "time") return s.epochs + s.rate*s.epochs*(s.epochs - 1)/2;
    if (s.decay === "step") return s.drop*geometricSum(s.rate, Math.floor(s.epochs/s.drop));
    return s.epochs;
  }

  function smallestVariance(s) { // equations 13, 39 and 48
    if (s.decay === "linear") return Math.pow(s.rate, s.epochs - 1);
    if (s.decay === "time") return 1/(1 + s.rate*(s.epochs - 1));
    if (s.decay === "step") return Math.pow(s.rate, Math.floor(s.epochs/s.drop) - 1);
    return 1;
  }

  function formulaSum(s, formula) {
    const printedStep = formula === "as_printed" && s.decay === "step";
    return precisionSum(s)/(printedStep ? s.drop*s.drop : 1);
  }

  function paperTotal(s, formula) {
    const unit = 1/(2*s.sigma*s.sigma), q = s.batch/s.n;
    return {rho: 13*q*q*unit*formulaSum(s, formula),
            omega: -log(q)/(4*unit)*smallestVariance(s)/(s.decay === "step" ? s.drop : 1)};
  }

  function derivedTotal(s) {
    const parts = eventsOf(s).map(e => [amplified(1/(2*e.sigma*e.sigma), e.q), e.steps]);
    return {rho: sum(parts.map(([p, steps]) => p.rho*steps)),
            omega: Math.min(...parts.map(([p]) => p.omega))};
  }

  function worst(conditions) {
    const margin = p => Math.abs(p.value - p.bound)*(p.holds ? 1 : -1);
    return conditions.reduce((a, b) => margin(b) < margin(a) ? b : a);
  }

  function preconditions(s, total, formula) {
    const derived = formula === "as_derived", steps = stepsOf(s), q = s.batch/s.n;
    const each = mergeEvents(eventsOf(s), 1e9).map(e => amplified(1/(2*e.sigma*e.sigma), q));
    const sampling = [0, 1, 2, 3].map(i => worst(each.map(a => a.conditions[i])));
    const reach = Math.max(total.omega - 1, 0), least = exp(-reach*reach*total.rho);
    const releases = derived ? steps : s.epochs, spread = sqrt(s.batch*(1 - q));
    return [...sampling, condition("omega > 1", total.omega, 1, total.omega > 1),
      ...(derived ? [] : [condition("delta >= exp(-(omega - 1)^2 rho)", s.delta, least,
                                    s.delta >= least)]),
      condition("releases composed >= releases made", releases, steps, releases >= steps),
      condition("batches of one fixed size: sd of the batch size <= 0", spread, 0, spread <= 0),
      condition("replace-one neighbours: sensitivity >= 2 clipping bounds", 1, 2, false)];
  }

  function hasFormula(s) { // the closed forms need whole phases
    return s.decay !== "step" || s.epochs % s.drop === 0;
  }

  function claim(s, formula) {
    const derived = formula === "as_derived";
    if (!derived && !hasFormula(s)) return {formula, epsilon: NaN, conditions: []};
    const total = derived ? derivedTotal(s) : paperTotal(s, formula);
    const conditions = preconditions(s, total, formula);
    const follows = conditions.slice(0, 5).every(p => p.holds);
    const epsilon = derived && !follows ? Infinity
      : tcdpEpsilon(total.rho, derived ? total.omega : Infinity, s.delta);
    return {formula, epsilon, conditions};
  }

  // --- Privacy loss distributions (budgets/certified, budgets/risk) -----------------------
  function lossSpread({sigma, q}) { // of one release, for small q
    return q*sqrt(Math.expm1(Math.min(1/(sigma*sigma), 700)));
  }

  function lossWidth({sigma, q}) {
    const full = (10.3*sigma + 0.5)/(sigma*sigma);
    if (q === 1) return 2*full;
    if (full < 700) return Math.log1p(q*Math.expm1(full)) - Math.log1p(-q);
    return full + log(q) - Math.log1p(-q);
  }

  function composable(events, atMost = 128) {
    if (events[0].q !== 1) return mergeEvents(events, atMost);
    const full = sum(events.map(e => e.steps/(e.sigma*e.sigma)));
    return [{sigma: 1/sqrt(full), q: 1, steps: 1}];
  }

  function fft(re, im) { // in place; a power of two
    const n = re.length;
    for (let i = 1, j = 0; i < n; i++) {
      let bit = n >> 1;
      for (; j & bit; bit >>= 1) j ^= bit;
      j ^= bit;
      if (i < j) {
        let swap = re[i]; re[i] = re[j]; re[j] = swap;
        swap = im[i]; im[i] = im[j]; im[j] = swap;
      }
    }
    const {cos, sin} = circle(n);
    for (let half = 1; half < n; half <<= 1) {
      const stride = (n >> 1)/half;
      for (let start = 0; start < n; start += half << 1) {
        for (let k = start, w = 0; k < start + half; k++, w += stride) {
          const m = k + half, c = cos[w], s = sin[w];
          const x = re[m]*c - im[m]*s, y = re[m]*s + im[m]*c;
          re[m] = re[k] - x; im[m] = im[k] - y;
          re[k] += x; im[k] += y;
        }
      }
    }
  }

  const circles = new Map();
  function circle(n) {
    if (!circles.has(n)) {
      const cos = new Float64Array(n >> 1), sin = new Float64Array(n >> 1);
      for (let i = 0; i < n >> 1; i++) {
        cos[i] = Math.cos(2*Math.PI*i/n);
        sin[i] = -Math.sin(2*Math.PI*i/n);
      }
      circles.set(n, {cos, sin});
    }
    return circles.get(n);
  }

  // Outputs where the loss is a grid point; masses of N(0, sigma^2) and N(1, sigma^2) between
  function outputAt(loss, {sigma, q}) {
    if (q === 1) return 0.5 + sigma*sigma*loss;
    const below = log(-Math.expm1(Math.min(Math.log1p(-q) - loss, 0)));
    return 0.5 + sigma*sigma*(loss + below - log(q));
  }

  const cell = (a, b) => a > 0 ? ndtr(-a) - ndtr(-b) : ndtr(b) - ndtr(a);

  function lifted(value, a, b) { // e^value times the mass between a and b, also far out
    if (a < 10) return exp(value)*cell(a, b);
    const end = b === Infinity ? 0 : exp((a - b)*(a + b)/2)*scaled(b/Math.SQRT2);
    return exp(value - a*a/2)*(scaled(a/Math.SQRT2) - end)/2;
  }

  function singleLosses(event, h, reach) { // both directions, by connecting dots (DGKKM22)
    const {sigma, q} = event;
    const lossOf = x => q === 1 ? (2*x - 1)/(2*sigma*sigma) : lossAt(x/sigma, sigma, q);
    const first = Math.floor(lossOf(-reach*sigma)/h);
    const last = Math.ceil(lossOf(1 + reach*sigma)/h), size = last - first + 1;
    const p = new Float64Array(size), spread = -Math.expm1(-h);
    let left = -Infinity, top = 0, bottom = 0;
    for (let i = 0; i <= size; i++) {
      const right = i < size ? outputAt((first + i)*h, event) : Infinity;
      const absent = cell(left/sigma, right/sigma);
      const present = cell((left - 1)/sigma, (right - 1)/sigma);
      const mass = (1 - q)*absent + q*present,
            low = lifted((first + i - 1)*h, left/sigma, right/sigma);
      if (i === 0) {
        p[0] = mass;
        bottom = Math.max(0, absent - exp(-first*h)*mass);
      } else if (i === size) {
        top = Math.max(0, mass - low);
        p[size - 1] += mass - top;
      } else {
        const upper = Math.min(Math.max((mass - low)/spread, 0), mass);
        p[i] += upper;
        p[i - 1] += mass - upper;
      }
      left = right;
    }
    return {p, first, last, top, bottom, steps: event.steps};
  }

  function coarse(single, h, flipped) { // about 2,000 values, for the window alone
    const {p, first} = single, block = Math.max(1, Math.floor(p.length/2000));
    const values = [], probs = [];
    for (let i = 0; i < p.length; i += block) {
      let mass = 0, mean = 0;
      for (let j = i; j < Math.min(i + block, p.length); j++) {
        const w = flipped && p[j] > 0 ? exp(log(p[j]) - (first + j)*h) : p[j];
        mass += w; mean += w*j;
      }
      if (mass > 0) {
        values.push((flipped ? -1 : 1)*(first + mean/mass)*h);
        probs.push(mass);
      }
    }
    return {values, probs, steps: single.steps};
  }

  function windowOf(parts, tail) { // what a sum of losses leaves with probability `tail`
    const moments = parts.map(({values, probs, steps}) => {
      const mean = sum(values.map((v, i) => v*probs[i]));
      return steps*sum(values.map((v, i) => (v - mean)**2*probs[i]));
    });
    const sd = sqrt(sum(moments));
    const ends = parts.flatMap(p => [p.values[0], p.values[p.values.length - 1]]);
    const far = Math.max(...ends.map(Math.abs)), tilts = [];
    for (let i = 0; i < 24; i++) tilts.push(0.1*Math.pow(1000, i/23)/sd);
    for (let i = 0; i < 16; i++) tilts.push(0.3*Math.pow(100, i/15)/far);
    let low = -Infinity, high = Infinity;
    for (const t of tilts) {
      high = Math.min(high, (sum(parts.map(p => logMoment(p, t))) + log(2/tail))/t);
      low = Math.max(low, -(sum(parts.map(p => logMoment(p, -t))) + log(2/tail))/t);
    }
    const least = sum(parts.map(p => p.steps*p.values[0]));
    const most = sum(parts.map(p => p.steps*p.values[p.values.length - 1]));
    return [Math.max(low, Math.min(least, most)), Math.min(high, Math.max(least, most))];
  }

  function logMoment({values, probs, steps}, t) {
    let top = -Infinity, total = 0;
    for (let i = 0; i < values.length; i++) top = Math.max(top, t*values[i]);
    for (let i = 0; i < values.length; i++) total += probs[i]*exp(t*values[i] - top);
    return steps*(top + log(total));
  }

  function multiplyPower(re, im, at, x, y, power) { // (re, im)[at] *= (x + iy)^power
    let a = re[at], b = im[at];
    for (let n = power; n > 0;) {
      if (n & 1) { const c = a*x - b*y; b = a*y + b*x; a = c; }
      n >>>= 1;
      if (n) { const c = x*x - y*y; y = 2*x*y; x = c; }
    }
    re[at] = a; im[at] = b;
  }

  // One transform holds both directions, removing as its real and adding as its imaginary part
  function transformed(singles, h, size) {
    const half = size/2 + 1, make = () => new Float64Array(half).fill(1);
    const R = [make(), new Float64Array(half)], A = [make(), new Float64Array(half)];
    const re = new Float64Array(size), im = new Float64Array(size);
    const wrap = i => ((i % size) + size) % size;
    for (const {p, first, steps} of singles) {
      re.fill(0); im.fill(0);
      for (let j = 0; j < p.length; j++) {
        re[wrap(first + j)] += p[j];
        if (p[j] > 0) im[wrap(-first - j)] += exp(log(p[j]) - (first + j)*h);
      }
      fft(re, im);
      for (let k = 0; k < half; k++) {
        const m = (size - k) % size;
        multiplyPower(R[0], R[1], k, (re[k] + re[m])/2, (im[k] - im[m])/2, steps);
        multiplyPower(A[0], A[1], k, (im[k] + im[m])/2, (re[m] - re[k])/2, steps);
      }
    }
    for (let k = 0; k < half; k++) { // the inverse is a transform of the conjugate
      const m = (size - k) % size;
      re[k] = R[0][k] - A[1][k]; im[k] = -(R[1][k] + A[0][k]);
      re[m] = R[0][k] + A[1][k]; im[m] = R[1][k] - A[0][k];
    }
    fft(re, im);
    return {removing: re.map(v => v/size), adding: im.map(v => -v/size)};
  }

  const MOST = 2**20;

  function composedLosses(events, h, {reach = 10.3, tail = 1e-15} = {}) {
    const singles = events.map(e => singleLosses(e, h, reach));
    const ends = [false, true].map(flipped =>
      windowOf(singles.map(s => coarse(s, h, flipped)), tail));
    const longest = Math.max(...singles.map(s => s.p.length));
    const needed = Math.max(longest, ...ends.map(([a, b]) => (b - a)*1.02/h)) + 16;
    const size = 2**Math.ceil(Math.log2(needed));
    if (!(size <= MOST)) return null;
    const both = transformed(singles, h, size);
    return ["removing", "adding"].map((way, i) => {
      const start = Math.floor((ends[i][0] - 0.01*(ends[i][1] - ends[i][0]))/h) - 4;
      const known = sum(singles.map(s => s.steps*Math.log1p(-(i ? s.bottom : s.top))));
      const probs = new Float64Array(size);
      for (let j = 0; j < size; j++)
        probs[j] = Math.max(0, both[way][(((start + j) % size) + size) % size]);
      return {probs, first: start, h, certain: -Math.expm1(known)};
    });
  }

  function epsilonOf({probs, first, h, certain}, delta) { // exact between grid points
    let mass = certain, lowered = 0; // lowered: the sum of p e^(epsilon - loss) at a point
    if (certain > delta) return Infinity;
    for (let j = probs.length - 1; j >= 0; j--) {
      const value = (first + j)*h;
      if (value < 0) break;
      if (mass - lowered > delta) return value + log((mass - delta)/lowered);
      mass += probs[j];
      lowered = (lowered + probs[j])*exp(-h);
    }
    const zero = mass - lowered*exp(h*(1 + Math.ceil(Math.max(first, 0)) - 1));
    return zero > delta ? Math.max(0, log((mass - delta)/lowered) - h) : 0;
  }

  function pldEpsilon(events, delta) { // or RDP's, where that is less or PLD fails
    const few = composable(events), rdp = rdpEpsilon(events, delta).epsilon;
    const by = (note, epsilon = rdp) => ({epsilon, accountant: epsilon === rdp ? "rdp" : "pld",
                                          note});
    if (rdp === 0) return by("RDP certifies 0");
    if (delta < 1e-10) return by("PLD is not used below delta = 1e-10");
    const widths = sum(few.map(lossWidth)), scale = rdpEpsilon(few, delta).epsilon;
    const share = widths/100000, spread = Math.min(...few.map(lossSpread));
    const h = Math.max(2e-5*scale, share/10, Math.min(share, spread/10));
    const both = composedLosses(few, h);
    const found = both ? Math.max(...both.map(l => epsilonOf(l, delta - 1e-12))) : Infinity;
    if (!(found <= rdp)) return by(`PLD gives more on a grid of ${h.toPrecision(2)}`);
    return by(`on a grid of ${h.toPrecision(2)}`, found);
  }

  // --- The best attack (budgets/risk) -----------------------------------------------------
  function deltasOf({probs, first, h, certain}, count) { // at 0, h, 2h, ...
    const deltas = new Float64Array(count);
    let mass = certain, lowered = 0;
    for (let at = first + probs.length - 1; at >= 0; at--) {
      if (at < count) deltas[at] = Math.min(1, Math.max(0, mass - lowered));
      mass += at >= first ? probs[at - first] : 0;
      lowered = (lowered + (at >= first ? probs[at - first] : 0))*exp(-h);
    }
    return deltas;
  }

  function riskOf(events) { // upper bounds for any attack
    const few = composable(events), h0 = sum(few.map(lossWidth))/100000;
    if (Math.max(...few.map(lossWidth)) > 690) return null;
    const rough = few.map(e => coarse(singleLosses(e, Math.max(h0, lossWidth(e)/4096), 8.5),
                                      Math.max(h0, lossWidth(e)/4096), false));
    const [low, high] = windowOf(rough, 1e-12), h = Math.max((high - low)/120000, 1e-7);
    const both = composedLosses(few, Math.max(h, Math.max(...few.map(lossWidth))/200000),
                                {reach: 8.5, tail: 1e-12});
    if (!both) return null;
    const step = both[0].h;
    const count = Math.max(2, Math.min(Math.ceil(100/step),
      Math.max(...both.map(l => l.first + l.probs.length))));
    const ways = both.map(l => deltasOf(l, count));
    const deltas = ways[0].map((d, i) => Math.max(d, ways[1][i]));
    return {truePositive: [1e-3, 1e-2, 1e-1].map(rate => truePositive(deltas, step, rate)),
            advantage: deltas[0], mu: muOf(deltas, step)};
  }

  function truePositive(deltas, h, alpha) {
    let misses = 0;
    for (let i = 0; i < deltas.length; i++) {
      const left = 1 - deltas[i], odds = exp(i*h);
      misses = Math.max(misses, left - odds*alpha, (left - alpha)/odds);
    }
    return 1 - misses;
  }

  function muOf(deltas, h) { // least mu of Gaussian DP, for rates from 1e-6
    const at = new Set([0]), last = deltas.length - 1;
    for (let i = 1; i <= 3000; i++) {
      at.add(Math.round(i*last/3000));
      at.add(Math.round(Math.pow(last, i/3000)));
    }
    const grid = [...at].sort((a, b) => a - b), least = 1e-6;
    let mu = 0, any = deltas[0] > 0, last_alpha = 0.5, seen = false;
    for (let k = 0; k + 1 < grid.length; k++) {
      const [a, b] = [grid[k], grid[k + 1]], odds = exp(a*h);
      const rise = odds*Math.expm1((b - a)*h);
      const alpha = Math.min((deltas[a] - deltas[b])/rise, last_alpha);
      const beta = 1 - deltas[a] - odds*alpha;
      if (!(alpha >= least)) break;
      last_alpha = alpha;
      if (beta < least) continue;
      seen = true;
      mu = Math.max(mu, -ndtri(alpha) - ndtri(beta));
    }
    const end = 1 - truePositive(deltas, h, least);
    if (end >= least) { seen = true; mu = Math.max(mu, -ndtri(least) - ndtri(end)); }
    if (!any) return 0;
    return seen ? Math.max(0, mu) : Infinity;
  }

  // --- The other way round: a target epsilon to the first multiplier ----------------------
  function smallestSigma(epsilonOfSigma, target, start, rtol) {
    let high = start, low = start;
    for (let i = 0; epsilonOfSigma(high) > target && i < 200; i++) { low = high; high *= 1.5; }
    if (low === high) {
      for (let i = 0; epsilonOfSigma(low) <= target && i < 200; i++) { high = low; low /= 1.5; }
    }
    while (high > low*(1 + rtol)) {
      const middle = sqrt(low*high);
      if (epsilonOfSigma(middle) <= target) high = middle; else low = middle;
    }
    return high;
  }

  const FIGURE_9_READING = 0.0206;

  function calibrateClaim(s, target, formula) {
    if (!hasFormula(s)) return NaN;
    const L = -log(s.delta), read = formula === "as_printed" && target === 1 && s.delta === 1e-5;
    const rho = read ? FIGURE_9_READING : (target/(sqrt(L + target) + sqrt(L)))**2;
    return s.batch/s.n*sqrt(13*formulaSum(s, formula)/(2*rho));
  }

  function calibrate(s, target, accountant) {
    if (accountant === "as_printed" || accountant === "as_stated")
      return calibrateClaim(s, target, accountant);
    const events = sigma => eventsOf({...s, sigma});
    const rdp = smallestSigma(x => rdpEpsilon(events(x), s.delta).epsilon, target, 1, 1e-6);
    if (accountant === "rdp") return rdp;
    return smallestSigma(x => pldEpsilon(events(x), s.delta).epsilon, target, rdp, 2e-4);
  }

  return {ndtr, ndtri, eventsOf, stepsOf, multiplierAt, rdpEpsilon, claim, pldEpsilon,
          riskOf, calibrate, composable, OPACUS_ORDERS, ORDERS};
}

globalThis.dpNumerics = numerics();

// --- The page ---------------------------------------------------------------------------------
const INPUTS = { // name: [label, least, most, whole, default]
  sigma: ["noise multiplier at the start, σ", 0.05, 20, false, 1],
  rate: ["decay rate, R", 0.3, 0.999, false, 0.5],
  drop: ["epochs between drops, K", 1, 50, true, 10],
  epochs: ["epochs, E", 1, 200, true, 100],
  batch: ["expected batch size, b", 1, 4096, true, 64],
  n: ["data set size, n", 100, 1000000, true, 60000],
  delta: ["δ", 1e-10, 0.01, false, 1e-5]};
const DECAYS = {none: "none", linear: "linear (geometric)", time: "time", step: "step"};
const CLAIMS = {as_printed: "global_adapt_v2, as its table prints it",
  as_stated: "global_adapt_v2, as its text states it",
  as_derived: "global_adapt_v2, as its lemmas give it"};
const TARGETS = {rdp: "certified by RDP", pld: "certified by PLD",
  as_printed: "claimed, as printed", as_stated: "claimed, as stated"};
const PRESETS = {
  "global_adapt_v2: printed for ε = 1":
    "sigma=0.1916&decay=step&rate=0.5&drop=10&epochs=100&batch=64&n=60000&delta=0.00001",
  "the same schedule, certified ε = 1":
    "sigma=17.98&decay=step&rate=0.5&drop=10&epochs=100&batch=64&n=60000&delta=0.00001",
  "plain DP-SGD on MNIST":
    "sigma=1.1&decay=none&rate=0.5&drop=10&epochs=60&batch=256&n=60000&delta=0.00001"};
const START = {sigma: 0.1916, decay: "step", rate: 0.5, drop: 10, epochs: 100, batch: 64,
               n: 60000, delta: 1e-5};
const N = globalThis.dpNumerics;

function say(x) { // a number as a table shows it
  if (x === undefined) return "…";
  if (Number.isNaN(x)) return "no formula";
  if (x === Infinity) return "∞ (nothing follows)";
  if (x >= 1e6) return x.toExponential(2);
  if (x >= 1000) return Math.round(x).toLocaleString("en");
  return x === 0 ? "0" : String(+x.toPrecision(4));
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), s = {...START};
  for (const name of Object.keys(INPUTS)) {
    const value = Number(given.get(name));
    if (given.has(name) && value > 0 && Number.isFinite(value)) s[name] = value;
  }
  if (given.get("decay") in DECAYS) s.decay = given.get("decay");
  return s;
}

function wrongWith(s) { // one sentence, or nothing
  if (s.batch > s.n) return `the batch size must be at most the data set size, ${s.n}`;
  if (s.decay !== "none" && !(s.rate < 1)) return "the decay rate must be below 1";
  if (!(s.delta < 1)) return "δ must be below 1";
  for (const [name, [label, , , whole]] of Object.entries(INPUTS)) {
    if (!(s[name] > 0)) return `${label} must be above 0`;
    if (whole && !Number.isInteger(s[name])) return `${label} must be a whole number`;
  }
  const least = N.multiplierAt(s, s.epochs - 1);
  if (!(least > 0.005)) return "the noise falls below a multiplier of 0.005: use less decay";
  return "";
}

function addressOf(s) {
  return "#" + ["sigma", "decay", "rate", "drop", "epochs", "batch", "n", "delta"]
    .map(name => `${name}=${s[name]}`).join("&");
}

function pythonOf(s) {
  const cls = {none: "Constant", linear: "LinearDecay", time: "TimeDecay", step: "StepDecay"};
  const rest = (s.decay === "none" ? "" : `, decay_rate=${s.rate}`)
    + (s.decay === "step" ? `, drop_every=${s.drop}` : "");
  return `from dp_companion.budgets.certified import budget_report
from dp_companion.budgets.decayed import claimed_budget
from dp_companion.budgets.events import gaussian_events
from dp_companion.budgets.risk import risk_of
from dp_companion.budgets.schedules import ${cls[s.decay]}, PoissonPlan

plan = PoissonPlan(dataset_size=${s.n}, expected_batch_size=${s.batch}, epochs=${s.epochs})
schedule = ${cls[s.decay]}(initial=${s.sigma}${rest})
events = gaussian_events(schedule, plan)
claim = claimed_budget(schedule, plan, delta=${s.delta}, formula="as_printed")
print(budget_report(events, delta=${s.delta}, claimed=claim))
print(risk_of(events))
`;
}

function picture(s) { // the schedule as an SVG: multiplier by epoch
  const width = 460, height = 190, left = 52, bottom = 34, top = 12, right = 10;
  const values = Array.from({length: s.epochs}, (_, e) => N.multiplierAt(s, e));
  const most = values[0]*1.05;
  const x = e => left + (width - left - right)*e/s.epochs;
  const y = v => top + (height - top - bottom)*(1 - v/most);
  const line = values.map((v, e) => `${e ? "L" : "M"}${x(e).toFixed(1)},${y(v).toFixed(1)}`
    + `H${x(e + 1).toFixed(1)}`).join("");
  const text = (at, up, words, anchor) =>
    `<text x="${at}" y="${up}" text-anchor="${anchor}">${words}</text>`;
  const last = values[values.length - 1];
  return `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Noise multiplier from `
    + `${say(values[0])} at the first epoch to ${say(last)} at the last">`
    + `<path class="axis" d="M${left},${top}V${height - bottom}H${width - right}"/>`
    + `<path class="line" d="${line}"/>`
    + text(left - 6, y(values[0]) + 5, say(values[0]), "end")
    + text(left - 6, height - bottom + 4, "0", "end")
    + text(left, height - bottom + 16, "0", "middle")
    + text(width - right, height - bottom + 16, s.epochs, "end")
    + text((left + width - right)/2, height - 4, `epoch; the last has σ = ${say(last)}`,
           "middle") + "</svg>";
}

function lamps(conditions) {
  const list = make("ul", {class: "lamps"});
  for (const {name, holds} of conditions) {
    const mark = make("b", {}, holds ? "met" : "not met");
    list.append(make("li", {class: holds ? "met" : "unmet"}, mark, ` ${name}`));
  }
  return list;
}

function verdict(claimed, certified) {
  if (Number.isNaN(claimed)) return ["open", "The paper has no formula for this schedule: K must "
    + "divide the epochs."];
  if (claimed >= certified) return ["holds", `The printed claim, ε = ${say(claimed)}, holds: ε = `
    + `${say(certified)} is certified.`];
  return ["refuted", `The printed claim is ε = ${say(claimed)}; what is certified is ε = `
    + `${say(certified)}.`];
}

function page(root) {
  let s = fromAddress(), count = 0;
  const shown = {}, fields = {};
  const code = `const N = (${numerics})(); onmessage = ({data: [id, s, target]}) => {
    const events = N.eventsOf(s);
    if (target) return postMessage([id, {sigma: N.calibrate(s, target.epsilon, "pld")}]);
    postMessage([id, {pld: N.pldEpsilon(events, s.delta)}]);
    postMessage([id, {risk: N.riskOf(events)}]); };`;
  const blob = URL.createObjectURL(new Blob([code], {type: "text/javascript"}));
  let worker = null;

  function ask(message, answer) { // the newest question alone: an older one is dropped
    if (worker) worker.terminate();
    worker = new Worker(blob);
    const id = ++count;
    worker.onmessage = ({data: [from, found]}) => { if (from === id) answer(found); };
    worker.postMessage([id, ...message]);
  }

  function field(name) {
    const [label, least, most, whole] = INPUTS[name], id = `dp-${name}`;
    const number = make("input", {id, type: "number", step: whole ? 1 : "any", min: 0});
    const slider = make("input", {type: "range", min: 0, max: 1000, "aria-label": label});
    const place = v => 1000*Math.log(v/least)/Math.log(most/least);
    number.addEventListener("input", () => set({[name]: Number(number.value)}, number));
    slider.addEventListener("input", () => {
      const value = least*Math.pow(most/least, slider.value/1000);
      set({[name]: whole ? Math.round(value) : +value.toPrecision(3)}, slider);
    });
    fields[name] = from => {
      if (from !== number) number.value = s[name];
      if (from !== slider) slider.value = place(s[name]);
    };
    const row = make("div", {class: "field"}, make("label", {for: id}, label), slider, number);
    shown[`row-${name}`] = row;
    return row;
  }

  function chooser() {
    const select = make("select", {id: "dp-decay"});
    for (const [value, words] of Object.entries(DECAYS))
      select.append(make("option", {value}, words));
    select.addEventListener("change", () => set({decay: select.value}, select));
    fields.decay = () => { select.value = s.decay; };
    return make("div", {class: "field"}, make("label", {for: "dp-decay"}, "decay of the variance"),
                select);
  }

  function row(kind, name, words) {
    shown[name] = make("td", {"data-name": name});
    const more = shown[`${name}-more`] = make("td", {});
    return make("tr", {class: kind}, make("th", {scope: "row"}, words), shown[name], more);
  }

  function table(caption, ...rows) {
    return make("table", {}, make("caption", {}, caption), make("tbody", {}, ...rows));
  }

  function inverse() {
    const target = make("input", {id: "dp-target", type: "number", step: "any", min: 0, value: 1});
    const kind = make("select", {"aria-label": "which epsilon"});
    for (const [value, words] of Object.entries(TARGETS))
      kind.append(make("option", {value}, words));
    const answer = make("output", {"aria-live": "polite"});
    const button = make("button", {type: "button"}, "find the noise multiplier");
    button.addEventListener("click", () => {
      const epsilon = Number(target.value), done = sigma => {
        if (!(sigma > 0)) { answer.textContent = "no formula for this schedule"; return; }
        answer.textContent = `σ = ${say(sigma)}`;
        set({sigma: +(sigma*1.0000005).toPrecision(7)});
      };
      if (!(epsilon > 0)) { answer.textContent = "the target must be above 0"; return; }
      answer.textContent = "…";
      if (kind.value === "pld") ask([s, {epsilon}], found => done(found.sigma));
      else done(N.calibrate(s, epsilon, kind.value));
    });
    return make("div", {class: "inverse"}, make("label", {for: "dp-target"},
      "The other way round: for a target ε of"), target, kind, button, answer);
  }

  function copier() {
    const button = make("button", {type: "button", class: "copy-python"}, "copy the Python");
    button.addEventListener("click", async () => {
      const text = shown.python.textContent;
      try { await navigator.clipboard.writeText(text); }
      catch (refused) { getSelection().selectAllChildren(shown.python);
                        document.execCommand("copy"); }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy the Python"; }, 1500);
    });
    return button;
  }

  function layout() {
    const presets = make("p", {class: "presets"}, "Start from: ");
    for (const [words, hash] of Object.entries(PRESETS))
      presets.append(make("a", {href: `#${hash}`}, words), " ");
    const left = make("div", {class: "inputs"}, field("sigma"), chooser(),
                      ...["rate", "drop", "epochs", "batch", "n", "delta"].map(field), inverse());
    shown.picture = make("div", {class: "picture"});
    shown.verdict = make("p", {class: "verdict", "aria-live": "polite"});
    shown.python = make("pre", {tabindex: 0}, "");
    const claims = table("Claimed ε, and the conditions of the lemmas used",
      ...Object.entries(CLAIMS).map(([name, words]) => row("claimed", name, words)),
      row("claimed", "sad", "sad: Rényi DP of all steps"),
      row("claimed", "sanitization", "sanitization: Rényi DP, Opacus's orders"));
    const certified = table("Certified ε: upper bounds for Poisson batches, one record added or "
      + "removed", row("certified", "rdp", "by Rényi DP"), row("certified", "pld", "by PLD"));
    const attack = table("The best attack: what no membership attack can exceed",
      row("attack", "mu", "μ of Gaussian DP"),
      row("attack", "tpr", "true positives at 0.1, 1 and 10 % false positives"),
      row("attack", "advantage", "largest advantage"));
    const right = make("div", {class: "outputs"}, shown.verdict, shown.picture, certified, attack);
    root.replaceChildren(presets, make("div", {class: "columns"}, left, right), claims,
      make("div", {class: "python"}, copier(), shown.python));
  }

  function show(name, value, more) {
    shown[name].textContent = typeof value === "string" ? value : say(value);
    if (more !== undefined) shown[`${name}-more`].replaceChildren(more);
  }

  function set(change, from) {
    s = {...s, ...change};
    history.replaceState(null, "", addressOf(s));
    draw(from);
  }

  function draw(from) {
    const began = performance.now(), wrong = wrongWith(s);
    for (const refresh of Object.values(fields)) refresh(from);
    shown["row-rate"].hidden = s.decay === "none";
    shown["row-drop"].hidden = s.decay !== "step";
    if (wrong) { if (worker) worker.terminate(); failed(wrong); return; }
    const events = N.eventsOf(s), rdp = N.rdpEpsilon(events, s.delta);
    shown.picture.innerHTML = picture(s);
    const claims = Object.keys(CLAIMS).map(name => N.claim(s, name));
    for (const {formula, epsilon, conditions} of claims) show(formula, epsilon, lamps(conditions));
    show("sad", rdp.epsilon, "the same as certified, where batches are Poisson");
    show("sanitization", N.rdpEpsilon(events, s.delta, N.OPACUS_ORDERS).epsilon,
         "for a sum over a secret batch; the method releases rows");
    show("rdp", rdp.epsilon, `order ${say(rdp.order)}, ${say(N.stepsOf(s))} steps`);
    judge(claims[0].epsilon, rdp.epsilon);
    shown.python.textContent = pythonOf(s);
    for (const name of ["pld", "mu", "tpr", "advantage"]) show(name, "…", "");
    root.dataset.milliseconds = performance.now() - began;
    root.dataset.state = "computing";
    ask([s], found => arrived(found, claims[0].epsilon));
  }

  function failed(wrong) {
    judgeWith("open", `Nothing to compute: ${wrong}.`);
    for (const name of [...Object.keys(CLAIMS), "sad", "sanitization", "rdp", "pld", "mu", "tpr",
                        "advantage"]) show(name, "–", "");
    root.dataset.state = "wrong";
  }

  function judgeWith(kind, words) {
    shown.verdict.className = `verdict ${kind}`;
    shown.verdict.textContent = words;
  }

  function judge(claimed, certified) { judgeWith(...verdict(claimed, certified)); }

  function arrived({pld, risk}, claimed) {
    if (pld) {
      show("pld", pld.epsilon, pld.note);
      judge(claimed, pld.epsilon);
      root.dataset.state = "certified";
      return;
    }
    const rates = risk && risk.truePositive.map(r => `${+(100*r).toPrecision(3)} %`).join(", ");
    show("mu", risk && risk.mu < Infinity ? risk.mu : "beyond what error rates of 1e-6 show", "");
    show("tpr", rates || "100 %", "");
    show("advantage", risk ? risk.advantage : 1, "");
    root.dataset.state = "done";
  }

  layout();
  addEventListener("hashchange", () => { s = fromAddress(); draw(); });
  draw();
}

if (globalThis.document) {
  const start = () => {
    const root = document.getElementById("dp-explorer");
    if (root) page(root);
  };
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
  else start();
}
})();
