//! Guests whose donors are killed at random moments, twice, while they count in all their memory: no
//! count is lost.
//!
//! Which donors, and at which page of a round, follows from a seed. `SSI_HV_TEST_SEED` repeats one,
//! and `SSI_HV_TEST_GUESTS` has more guests run in a row.

use std::io::Read as _;
use std::time::{Duration, Instant, SystemTime};

use fabric_test_support::Random;
use serde_json::{Value, json};

use crate::replicas::PAGES;
use crate::running::{LIMIT, Place, Running, count, node, until, vm_with};
use crate::support;

/// Pages of a guest between two looks at its copies.
const LOOK_EVERY: usize = PAGES / 8;
const NAME: &str = "survivor";

/// How donors keep the memory of the guests.
struct Way {
    flags: [&'static str; 2],
    donors: usize,
    /// How many are killed at once.
    at_once: u64,
    /// Guests in a row, unless more are wanted.
    guests: u64,
}

/// Two are left after the first kill, which hold both copies of everything.
const COPIES: Way = Way {
    flags: ["--replicas", "2"],
    donors: 3,
    at_once: 1,
    guests: 2,
};

/// Six are left after the first kill, which hold a piece of everything each.
const STRIPES: Way = Way {
    flags: ["--redundancy", "4+2"],
    donors: 8,
    at_once: 2,
    guests: 1,
};

/// A guest that increments the first and the last word of each page in each round, and prints both.
struct Guest {
    vm: Running,
    round: u32,
    /// The next one that it prints.
    page: usize,
}

impl Guest {
    /// Reads so many pages.
    fn read(&mut self, pages: usize) {
        let mut words = [0; 8];
        for _ in 0..pages {
            if self.vm.console.buffer().is_empty() {
                self.vm.speaks();
            }
            self.vm.console.read_exact(&mut words).expect("it walks");
            self.check(words);
        }
    }

    /// Checks what it printed of a page, which must have been incremented once in each round.
    fn check(&mut self, words: [u8; 8]) {
        let (page, round) = (self.page, self.round);
        let both = [round.to_le_bytes(); 2];
        assert_eq!(words[..], both.concat(), "page {page} in round {round}");
        self.page += 1;
        if self.page == PAGES {
            (self.page, self.round) = (0, round + 1);
        }
    }
}

/// What is known of a guest that has survived.
struct Survival {
    /// From the first kill until nothing lacked a copy, with the grace time.
    repair: Duration,
    /// The longest that a page took to come.
    slowest: Duration,
    rounds: u32,
}

fn status(place: &Place) -> Value {
    place.json(&["status", NAME, "--json"])["vms"][0].take()
}

/// Waits until so many donors are known to be lost and nothing lacks a copy. The guest goes on
/// meanwhile.
fn await_whole(place: &Place, guest: &mut Guest, losses: u64) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let now = status(place);
        assert_eq!(now["state"], "running", "{now}");
        let lost = count(&now, "/memory/replicas/losses");
        if lost == losses && count(&now, "/memory/replicas/degraded_bytes") == 0 {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{losses} losses, and no repair within {LIMIT:?}: {now}"
        );
        guest.read(LOOK_EVERY);
    }
}

/// Kills donors at once, none of them twice. Returns their numbers, as the VM has them.
fn kill(donors: &mut [Option<Running>], at_once: u64, random: &mut Random) -> Vec<usize> {
    let mut killed = Vec::new();
    while (killed.len() as u64) < at_once {
        let place = random.below(donors.len());
        if let Some(donor) = donors[place].take() {
            donor.signal(libc::SIGKILL);
            killed.push((place + 1, donor));
        }
    }
    // All have the signal before one is waited for.
    let ended = killed.into_iter().map(|(number, mut donor)| {
        assert_eq!(donor.code(), None);
        number
    });
    ended.collect()
}

fn survive(way: &Way, random: &mut Random) -> (Survival, String) {
    let place = Place::new();
    let (nodes, addresses): (Vec<_>, Vec<_>) = (0..way.donors).map(|_| node(&place, &[])).unzip();
    let mut donors: Vec<_> = nodes.into_iter().map(Some).collect();
    let lenders: Vec<_> = addresses
        .iter()
        .map(|address| format!("{address},memory=64M"))
        .collect();
    let mut flags = vec!["--name", NAME, "--donor-grace", "1"];
    flags.extend(way.flags);
    for donor in &lenders {
        flags.extend(["--donor", donor]);
    }
    let vm = vm_with(&place, tiny_guests::count_and_walk::code(), &flags);
    let mut guest = Guest {
        vm,
        round: 1,
        page: 0,
    };
    guest.read(PAGES);
    await_whole(&place, &mut guest, 0);

    let page = random.below(2 * PAGES);
    guest.read(page);
    let first = kill(&mut donors, way.at_once, random);
    let killed = Instant::now();
    await_whole(&place, &mut guest, way.at_once);
    let repair = killed.elapsed();
    guest.read(PAGES);

    let later = random.below(PAGES);
    guest.read(later);
    let second = kill(&mut donors, way.at_once, random);
    guest.read(2 * PAGES);
    let end = until(|| {
        let now = status(&place);
        let losses = count(&now, "/memory/replicas/losses");
        let are_known = losses == 2 * way.at_once;
        are_known.then_some(now.clone()).ok_or(now.to_string())
    });
    assert_eq!(end["state"], "running", "{end}");
    let mut out = [&first[..], &second].concat();
    out.sort_unstable();
    assert_eq!(end["memory"]["replicas"]["out"], json!(out), "{end}");

    guest.vm.signal(libc::SIGTERM);
    assert_eq!(guest.vm.code(), Some(143));
    let mut rest = Vec::new();
    guest.vm.console.read_to_end(&mut rest).expect("a pipe");
    for words in rest.as_chunks().0 {
        guest.check(*words);
    }
    until(|| {
        let nodes = place.json(&["status", "--json"])["nodes"].take();
        let lent = |node: &Value| count(node, "/leases") + count(node, "/lent_bytes");
        let all = nodes.as_array().expect("a list");
        let are_back = all.len() == donors.iter().flatten().count();
        let are_back = are_back && all.iter().all(|node| lent(node) == 0);
        are_back.then_some(()).ok_or(nodes.to_string())
    });
    let slowest_us = end.pointer("/faults/remote/latency_us/max");
    let slowest_us = slowest_us.and_then(Value::as_f64).expect("faults");
    let survival = Survival {
        repair,
        slowest: Duration::from_secs_f64(slowest_us / 1e6),
        rounds: guest.round,
    };
    let kills = format!("donors {first:?} at page {page}, then {second:?} at page {later}");
    (survival, kills)
}

/// Returns the number in a variable.
fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}: {text:?} is not a number")),
    )
}

fn all_survive(way: &Way) {
    if !support::kvm_is_there() {
        return;
    }
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seed = number("SSI_HV_TEST_SEED").unwrap_or(since.expect("after 1970").as_secs());
    println!("{}, seed {seed}", way.flags.join(" "));
    let mut random = Random(seed);
    let guests = number("SSI_HV_TEST_GUESTS").unwrap_or(way.guests);
    assert!(guests > 0, "SSI_HV_TEST_GUESTS is 0; name 1 or more");
    for guest in 1..=guests {
        let (survival, kills) = survive(way, &mut random);
        println!(
            "guest {guest}, {kills}: survived {} rounds, whole again after {:.1?}, slowest page {:.1?}",
            survival.rounds, survival.repair, survival.slowest
        );
    }
}

#[test]
fn guests_with_copies_survive_two_kills_at_random_moments() {
    all_survive(&COPIES);
}

#[test]
fn guests_with_stripes_survive_two_kills_of_two_donors_at_random_moments() {
    all_survive(&STRIPES);
}
