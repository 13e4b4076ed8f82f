use std::arch::x86_64::*;
use std::time::Instant;
use worker_kernels::*;
#[target_feature(enable = "avx2,fma")]
unsafe fn peak(n: usize) -> f32 {
    let mut s = [_mm256_set1_ps(0.0); 12];
    let (a, b) = (_mm256_set1_ps(std::hint::black_box(1.0001)), _mm256_set1_ps(std::hint::black_box(0.5)));
    for _ in 0..n {
        for x in &mut s {
            *x = _mm256_fmadd_ps(*x, a, b);
        }
        std::hint::black_box(&mut s[0]);
    }
    let mut t = s[0];
    for x in &s[1..] {
        t = _mm256_add_ps(t, *x);
    }
    _mm256_cvtss_f32(t)
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let threads: usize = a[1].parse().unwrap();
    let rounds: usize = a[2].parse().unwrap();
    let rows_list: Vec<usize> = a[3].split(',').map(|x| x.parse().unwrap()).collect();
    let k = CpuKernels::new("c", threads).unwrap();
    let shapes = [
        ("qkv", 576, 960, 30),
        ("o", 576, 576, 30),
        ("gate_up", 576, 3072, 30),
        ("down", 1536, 576, 30),
        ("head", 576, 49152, 1),
        ("gu hot", 576, 3072, 1),
    ];
    for rows in rows_list {
        let mut total = 0.0;
        let mut tf = 0.0;
        for (name, inp, outp, copies) in shapes {
            let bytes: Vec<u8> = (0..inp * outp)
                .flat_map(|i| half::bf16::from_f32(((i * 7919) % 1001) as f32 / 1000.0 - 0.5).to_le_bytes())
                .collect();
            let ws: Vec<_> = (0..copies)
                .map(|_| k.linear(&[WeightView::new(Dtype::Bf16, outp, inp, &bytes).unwrap()], &[]).unwrap())
                .collect();
            let x: Vec<f32> = (0..rows * inp).map(|i| ((i * 31) % 97) as f32 / 97.0).collect();
            let mut xb = k.buffer();
            k.write(&x, inp, &mut xb).unwrap();
            let mut out = k.buffer();
            let flop = 2.0 * (rows * inp * outp * copies) as f64;
            let mut t = vec![];
            let mut pk = vec![];
            for _ in 0..rounds {
                let s = Instant::now();
                let reps = if copies == 1 { 30 } else { 1 } * (if outp > 40000 { 1 } else { 1 });
                let reps = if outp > 40000 { 1 } else { reps };
                k.install(|| {
                    for _ in 0..reps {
                        for w in &ws {
                            k.linear_into(&xb, w, &mut out).unwrap();
                        }
                    }
                });
                t.push(s.elapsed().as_secs_f64() / reps as f64);
                let s = Instant::now();
                let n = 300_000;
                std::hint::black_box(unsafe { peak(n) });
                pk.push(n as f64 * 12.0 * 16.0 / s.elapsed().as_secs_f64() / 1e9);
            }
            t.sort_by(f64::total_cmp);
            pk.sort_by(f64::total_cmp);
            let q = |v: &[f64], p: f64| v[((v.len() - 1) as f64 * p) as usize];
            let g = |p| flop / q(&t, p) / 1e9;
            println!(
                "{rows:3} {name:8} GF/s best {:.1} p25 {:.1} p50 {:.1}   peak best {:.1} p75 {:.1} p50 {:.1}   frac best {:.2} p50 {:.2}   ms {:.2}",
                g(0.0),
                g(0.25),
                g(0.5),
                q(&pk, 1.0),
                q(&pk, 0.75),
                q(&pk, 0.5),
                g(0.0) / q(&pk, 1.0) / threads as f64,
                g(0.5) / q(&pk, 0.5) / threads as f64,
                q(&t, 0.25) * 1e3
            );
            if name != "gu hot" {
                total += q(&t, 0.25);
                tf += flop;
            }
        }
        println!("{rows:3} total p25 {:.2} ms, {:.1} GF/s", total * 1e3, tf / total / 1e9);
    }
}
