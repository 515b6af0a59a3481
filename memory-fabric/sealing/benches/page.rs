//! Time to seal and to open a page. Run with `cargo bench -p fabric-sealing`.

use fabric_pages::page::{PAGE_SIZE, PageBytes};
use fabric_sealing::{Place, VmKey};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 20;
const PAGES: usize = 4096;

fn best(what: &str, mut once: impl FnMut()) {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for _ in 0..PAGES {
            once();
        }
        best = best.min(started.elapsed().as_secs_f64() / 4096.0);
    }
    println!(
        "{what:>28}: {:.0} ns per page, {:.1} GB/s, best of {ROUNDS} rounds",
        best * 1e9,
        4096.0 / best / 1e9
    );
}

fn main() {
    let key = VmKey::random().expect("a key");
    let place = Place {
        node: 1,
        offset: 4096,
    };
    let mut page: PageBytes = [7; PAGE_SIZE];
    let mut copy: PageBytes = [0; PAGE_SIZE];
    best("seal", || {
        black_box(key.seal(place, black_box(&mut page)).expect("sealed"));
    });
    let seal = key.seal(place, &mut page).expect("sealed");
    best("copy, as before opening", || {
        copy.copy_from_slice(black_box(&page));
        black_box(&mut copy);
    });
    best("copy and open", || {
        copy.copy_from_slice(black_box(&page));
        key.open(place, seal, black_box(&mut copy)).expect("opened");
    });
}
