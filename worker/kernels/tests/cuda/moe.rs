//! A mixture of experts: who is chosen, how pairs are grouped, products and sums, each against its definition in f64; then all in a row.

use half::bf16;
use proptest::prelude::*;
use rand::RngExt;
use rand::rngs::StdRng;
use worker_kernels::cuda::moe::{
    self, MoeGemmParams, MoeGroupParams, MoeRouteParams, MoeSumParams, MoeTile, TILE_PAIRS,
};

use crate::machine::{Buffer, POISON, Run, launch, rng};

/// Whose weights add up to one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Weights {
    OfChosen,
    OfAll,
}

/// What the host can see of a routing: experts and weights, `[rows, top_k]`.
struct Routing {
    chosen: Buffer,
    weights: Buffer,
}

fn route(logits: &[f32], experts: usize, top_k: usize, weights: Weights, run: Run) -> Routing {
    let rows = logits.len() / experts;
    let device_logits = Buffer::of(logits);
    let routing = Routing {
        chosen: Buffer::poisoned::<u32>(rows * top_k),
        weights: Buffer::poisoned::<f32>(rows * top_k),
    };
    let params = MoeRouteParams {
        logits: device_logits.address(),
        chosen: routing.chosen.address(),
        weights: routing.weights.address(),
        rows: rows as u32,
        experts: experts as u32,
        top_k: top_k as u32,
        among_chosen: u32::from(weights == Weights::OfChosen),
    };
    launch(moe::route(rows, experts, top_k).unwrap(), &params, run).unwrap();
    routing
}

/// Experts of a row from the best to the worst: NaN last, equals by number.
fn ranked(logits: &[f32]) -> Vec<u32> {
    let mut experts: Vec<u32> = (0..logits.len() as u32).collect();
    let key = |expert: &u32| logits[*expert as usize];
    experts.sort_by(|a, b| {
        let (a, b) = (key(a), key(b));
        a.is_nan().cmp(&b.is_nan()).then_with(|| b.partial_cmp(&a).unwrap_or(std::cmp::Ordering::Equal))
    });
    experts
}

fn check_route(experts: usize, top_k: usize, weights: Weights, number: usize) {
    let mut rng = rng(number as u64);
    let rows = 6;
    let mut logits: Vec<f32> = (0..rows * experts).map(|_| rng.random_range(-6.0f32..6.0)).collect();
    // Of the second row many are equal, of the third most cannot be had, and the fourth has both zeros.
    logits[experts..2 * experts].iter_mut().for_each(|x| *x = x.round());
    logits[2 * experts..3 * experts].iter_mut().skip(1).for_each(|x| *x = f32::NEG_INFINITY);
    logits[3 * experts..4 * experts].iter_mut().for_each(|x| *x = if *x < 0.0 { -0.0 } else { 0.0 });
    let routing = route(&logits, experts, top_k, weights, Run::number(number));
    let (got_chosen, got_weights) = (routing.chosen.read::<u32>(), routing.weights.read::<f32>());
    for (row, logits) in logits.chunks(experts).enumerate() {
        let what = format!("{experts} experts, top {top_k}, {weights:?}, row {row}");
        let chosen = &ranked(logits)[..top_k];
        assert_eq!(&got_chosen[row * top_k..][..top_k], chosen, "{what}");
        let score = |expert: u32| f64::from(logits[expert as usize] - logits[chosen[0] as usize]).exp();
        let total: f64 = match weights {
            Weights::OfChosen => chosen.iter().map(|&expert| score(expert)).sum(),
            Weights::OfAll => (0..experts as u32).map(score).sum(),
        };
        for (got, &expert) in got_weights[row * top_k..].iter().zip(chosen) {
            let want = score(expert) / total;
            assert!((f64::from(*got) - want).abs() < 1e-5, "{what}: {got}, not {want}");
        }
    }
}

#[test]
fn the_best_experts_are_chosen_and_weighed() {
    let shapes =
        [(1, 1), (4, 2), (8, 2), (31, 4), (32, 32), (33, 5), (60, 4), (128, 8), (256, 8), (1024, 10)];
    for (number, (experts, top_k)) in shapes.into_iter().enumerate() {
        for weights in [Weights::OfChosen, Weights::OfAll] {
            check_route(experts, top_k, weights, number);
        }
    }
}

#[test]
fn logits_that_are_no_numbers_choose_experts_all_the_same_and_show() {
    let mut logits = vec![f32::NAN; 12];
    logits[3] = 1.0;
    logits[9] = f32::NAN;
    let routing = route(&logits, 6, 3, Weights::OfAll, Run::number(0));
    assert_eq!(routing.chosen.read::<u32>(), [3, 0, 1, 0, 1, 2]);
    assert!(routing.weights.read::<f32>()[3..].iter().all(|weight| weight.is_nan()));
}

/// Pairs by expert, and their tiles.
struct Groups {
    order: Buffer,
    places: Buffer,
    tiles: Buffer,
    tile_count: Buffer,
}

fn group(chosen: &Buffer, pairs: usize, experts: usize, run: Run) -> Groups {
    let groups = Groups {
        order: Buffer::poisoned::<u32>(pairs),
        places: Buffer::poisoned::<u32>(pairs),
        tiles: Buffer::poisoned::<u32>(3 * moe::most_tiles(pairs, experts)),
        tile_count: Buffer::poisoned::<u32>(1),
    };
    let params = MoeGroupParams {
        chosen: chosen.address(),
        order: groups.order.address(),
        places: groups.places.address(),
        tiles: groups.tiles.address(),
        tile_count: groups.tile_count.address(),
        pairs: pairs as u32,
        experts: experts as u32,
    };
    launch(moe::group(pairs, experts).unwrap(), &params, run).unwrap();
    groups
}

fn check_group(chosen: &[u32], experts: usize, number: usize) {
    let groups = group(&Buffer::of(chosen), chosen.len(), experts, Run::number(number));
    let mut order: Vec<u32> = (0..chosen.len() as u32).collect();
    order.sort_by_key(|&pair| chosen[pair as usize]);
    assert_eq!(groups.order.read::<u32>(), order, "order");
    for (pair, &place) in groups.places.read::<u32>().iter().enumerate() {
        assert_eq!(order[place as usize] as usize, pair, "place of pair {pair}");
    }
    let mut tiles = Vec::new();
    let mut first = 0;
    for expert in 0..experts as u32 {
        let past = first + chosen.iter().filter(|&&other| other == expert).count() as u32;
        for begin in (first..past).step_by(TILE_PAIRS) {
            tiles.push(MoeTile { expert, first: begin, end: past.min(begin + TILE_PAIRS as u32) });
        }
        first = past;
    }
    assert_eq!(groups.tile_count.read::<u32>(), [tiles.len() as u32]);
    let flat: Vec<u32> = tiles.iter().flat_map(|tile| [tile.expert, tile.first, tile.end]).collect();
    let got = groups.tiles.read::<u32>();
    assert_eq!(got[..flat.len()], flat);
    let poison = u32::from(POISON) << 16 | u32::from(POISON);
    assert!(got[flat.len()..].iter().all(|&word| word == poison), "tiles beyond the last are not written");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Few experts get many pairs, and some none.
    #[test]
    fn pairs_of_an_expert_come_together_in_their_order(
        pairs in prop_oneof![Just(0usize), Just(1), 31usize..34, 63usize..66, 255usize..258, 0usize..1500],
        experts in prop_oneof![Just(1usize), 2usize..40, Just(256), Just(1024)],
        skew in 1u32..6,
        seed in any::<u32>(),
    ) {
        let mut rng = rng(u64::from(seed));
        let chosen: Vec<u32> = (0..pairs)
            .map(|_| (rng.random_range(0.0f64..1.0).powi(skew as i32) * experts as f64) as u32)
            .collect();
        check_group(&chosen, experts, seed as usize % 1000);
    }
}

fn brains(rng: &mut StdRng, count: usize) -> Vec<bf16> {
    (0..count).map(|_| bf16::from_f32(rng.random_range(-1.0f32..1.0))).collect()
}

/// How an expert's product finds its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rows {
    ByPair { top_k: usize },
    ByPlace,
}

#[derive(Clone, Copy, Debug)]
struct Product {
    experts: usize,
    inputs: usize,
    outputs: usize,
    rows: Rows,
}

fn multiply(product: Product, x: &Buffer, w: &Buffer, groups: &Groups, pairs: usize, run: Run) -> Buffer {
    let Product { experts, inputs, outputs, rows } = product;
    let out = Buffer::poisoned::<u16>(pairs * outputs);
    let (order, top_k) = match rows {
        Rows::ByPair { top_k } => (groups.order.address(), top_k as u32),
        Rows::ByPlace => (0, 1),
    };
    let params = MoeGemmParams {
        x: x.address(),
        w: w.address(),
        out: out.address(),
        order,
        tiles: groups.tiles.address(),
        tile_count: groups.tile_count.address(),
        inputs: inputs as u32,
        outputs: outputs as u32,
        top_k,
        reserved: 0,
    };
    launch(moe::multiply(pairs, experts, inputs, outputs).unwrap(), &params, run).unwrap();
    out
}

fn dot(x: &[bf16], w: &[bf16]) -> f64 {
    x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum()
}

fn check_product(product: Product, pairs: usize, number: usize) {
    let Product { experts, inputs, outputs, rows } = product;
    let mut rng = rng(number as u64);
    let chosen: Vec<u32> = (0..pairs).map(|_| rng.random_range(0..experts as u32)).collect();
    let groups = group(&Buffer::of(&chosen), pairs, experts, Run::number(number));
    let order = groups.order.read::<u32>();
    let row_of = |place: usize| match rows {
        Rows::ByPair { top_k } => order[place] as usize / top_k,
        Rows::ByPlace => place,
    };
    let row_count = (0..pairs).map(row_of).max().map_or(0, |row| row + 1);
    let (x, w) = (brains(&mut rng, row_count * inputs), brains(&mut rng, experts * outputs * inputs));
    let run = Run::number(number);
    let out = multiply(product, &Buffer::of_bf16(&x), &Buffer::of_bf16(&w), &groups, pairs, run);
    for (place, got) in out.read_bf16().chunks(outputs).enumerate() {
        let row = &x[row_of(place) * inputs..][..inputs];
        let expert = chosen[order[place] as usize] as usize;
        for (output, got) in got.iter().enumerate() {
            let want = dot(row, &w[(expert * outputs + output) * inputs..][..inputs]);
            let near = (got.to_f64() - want).abs() <= want.abs() / 250.0 + 1e-4;
            assert!(near, "{product:?}, place {place}, output {output}: {got}, not {want}");
        }
    }
}

#[test]
fn products_take_each_pair_to_its_expert() {
    let by_pair = Rows::ByPair { top_k: 3 };
    let cases = [
        (Product { experts: 1, inputs: 8, outputs: 8, rows: Rows::ByPlace }, 1),
        (Product { experts: 3, inputs: 64, outputs: 128, rows: by_pair }, 65),
        (Product { experts: 5, inputs: 72, outputs: 136, rows: by_pair }, 130),
        (Product { experts: 4, inputs: 200, outputs: 120, rows: Rows::ByPlace }, 200),
        (Product { experts: 2, inputs: 328, outputs: 256, rows: by_pair }, 63),
        (Product { experts: 40, inputs: 128, outputs: 16, rows: Rows::ByPair { top_k: 1 } }, 20),
        (Product { experts: 2, inputs: 192, outputs: 264, rows: Rows::ByPlace }, 64),
    ];
    for (number, (product, pairs)) in cases.into_iter().enumerate() {
        for way in 0..3 {
            check_product(product, pairs, 3 * number + way);
        }
    }
}

#[test]
fn what_the_experts_gave_is_weighed_and_added() {
    for (number, (rows, width, top_k)) in
        [(1, 8, 1), (3, 24, 2), (5, 2056, 8), (257, 8, 4)].into_iter().enumerate()
    {
        let mut rng = rng(number as u64);
        let pairs = rows * top_k;
        let from = brains(&mut rng, pairs * width);
        let stream: Vec<f32> = (0..rows * width).map(|_| rng.random_range(-4.0f32..4.0)).collect();
        let weights: Vec<f32> = (0..pairs).map(|_| rng.random_range(0.0f32..1.0)).collect();
        let places: Vec<u32> = (0..pairs as u32).rev().collect();
        let out = Buffer::of(&stream);
        let buffers = (Buffer::of_bf16(&from), Buffer::of(&weights), Buffer::of(&places));
        let params = MoeSumParams {
            from: buffers.0.address(),
            weights: buffers.1.address(),
            places: buffers.2.address(),
            out: out.address(),
            rows: rows as u32,
            width: width as u32,
            top_k: top_k as u32,
            reserved: 0,
        };
        launch(moe::sum(rows, width).unwrap(), &params, Run::number(number)).unwrap();
        for (index, got) in out.read::<f32>().iter().enumerate() {
            let (row, column) = (index / width, index % width);
            let added: f64 = (row * top_k..(row + 1) * top_k)
                .map(|pair| f64::from(weights[pair]) * from[places[pair] as usize * width + column].to_f64())
                .sum();
            let want = f64::from(stream[index]) + added;
            assert!((f64::from(*got) - want).abs() < 1e-5, "row {row}, column {column}: {got}, not {want}");
        }
    }
}

/// Logits to stream, as a layer would: without the gate, whose kernel is tested elsewhere.
#[test]
fn a_whole_layer_gives_what_its_experts_give_row_by_row() {
    let (rows, experts, top_k, width, inner) = (37, 6, 2, 40, 24);
    let (mut rng, run, pairs) = (rng(77), Run::number(2), rows * top_k);
    let logits: Vec<f32> = (0..rows * experts).map(|_| rng.random_range(-3.0f32..3.0)).collect();
    let x = brains(&mut rng, rows * width);
    let (up, down) = (brains(&mut rng, experts * inner * width), brains(&mut rng, experts * width * inner));
    let routing = route(&logits, experts, top_k, Weights::OfChosen, run);
    let groups = group(&routing.chosen, pairs, experts, run);
    let first = Product { experts, inputs: width, outputs: inner, rows: Rows::ByPair { top_k } };
    let inside = multiply(first, &Buffer::of_bf16(&x), &Buffer::of_bf16(&up), &groups, pairs, run);
    let second = Product { experts, inputs: inner, outputs: width, rows: Rows::ByPlace };
    let results = multiply(second, &inside, &Buffer::of_bf16(&down), &groups, pairs, run);
    let out = Buffer::of(&vec![0.5f32; rows * width]);
    let params = MoeSumParams {
        from: results.address(),
        weights: routing.weights.address(),
        places: groups.places.address(),
        out: out.address(),
        rows: rows as u32,
        width: width as u32,
        top_k: top_k as u32,
        reserved: 0,
    };
    launch(moe::sum(rows, width).unwrap(), &params, run).unwrap();
    let got = out.read::<f32>();
    for row in 0..rows {
        let logits = &logits[row * experts..][..experts];
        let chosen = &ranked(logits)[..top_k];
        let score = |expert: u32| f64::from(logits[expert as usize] - logits[chosen[0] as usize]).exp();
        let total: f64 = chosen.iter().map(|&expert| score(expert)).sum();
        // `(what it is, how far off it may be)`.
        let mut want = vec![(0.5, 1e-4); width];
        for &expert in chosen {
            let weight = score(expert) / total;
            let matrix = |from: &'_ [bf16], at: usize, length: usize| from[at * length..][..length].to_vec();
            let inside: Vec<Rounded> = (0..inner)
                .map(|i| {
                    let w = matrix(&up, expert as usize * inner + i, width);
                    Rounded::product(&x[row * width..][..width], &w)
                })
                .collect();
            let (middle, open): (Vec<_>, Vec<_>) =
                inside.iter().map(|number| (number.is, number.open)).unzip();
            for (column, (want, off)) in want.iter_mut().enumerate() {
                let w = matrix(&down, expert as usize * width + column, inner);
                let result = dot(&middle, &w);
                let from_open: f64 = open.iter().zip(&w).map(|(open, w)| open * w.to_f64().abs()).sum();
                *want += weight * result;
                *off += weight * (from_open + BF16_ROUNDING * (result.abs() + from_open));
            }
        }
        for (column, (want, off)) in want.iter().enumerate() {
            let got = f64::from(got[row * width + column]);
            assert!((got - want).abs() < *off, "row {row}, column {column}: {got}, not {want} ± {off}");
        }
    }
}

/// Half a unit in the last place, and a little more for sums in f32.
const BF16_ROUNDING: f64 = 1.01 / 256.0;

/// A product's result as bf16, and by how much it may be another, since sums in f32 may lie on the other side of where the rounding changes.
struct Rounded {
    is: bf16,
    open: f64,
}

impl Rounded {
    fn product(x: &[bf16], w: &[bf16]) -> Self {
        let exact = dot(x, w);
        let sizes: f64 = x.iter().zip(w).map(|(x, w)| (x.to_f64() * w.to_f64()).abs()).sum();
        let slack = sizes * x.len() as f64 * f64::from(f32::EPSILON);
        let [low, is, high] = [exact - slack, exact, exact + slack].map(bf16::from_f64);
        Self { is, open: high.to_f64() - low.to_f64() }
    }
}
