//! Time of a page's fingerprint, which each fetched page costs once, and each dirty page once more
//! when it is evicted. Run with `cargo bench -p fabric-pages`.

use fabric_pages::fingerprint::FingerprintKey;
use fabric_pages::page::{PAGE_SIZE, PageBytes};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 20;

fn main() {
    let key = FingerprintKey::random().expect("random numbers");
    // In the first-level cache, as a page that was just received; and 64 MiB, in none.
    for pages in [1_usize, 16_384] {
        let pages: Vec<PageBytes> = (0..pages)
            .map(|page| std::array::from_fn(|byte| (page ^ byte).to_le_bytes()[0]))
            .collect();
        let repeats = 16_384 / pages.len();
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            let started = Instant::now();
            for _ in 0..repeats {
                for page in &pages {
                    black_box(key.of(black_box(page)));
                }
            }
            best = best.min(started.elapsed().as_secs_f64() / 16_384.0);
        }
        println!(
            "{:>6} pages: {:.0} ns per page, {:.1} GB/s, best of {ROUNDS} rounds",
            pages.len(),
            best * 1e9,
            4096.0 / best / 1e9
        );
    }
    assert_eq!(PAGE_SIZE, 4096);
}
