//! Litmus tests: small programs on several nodes, of whose outcomes x86-TSO forbids some.
//!
//! A round of a test has cells of its own. The nodes go through the rounds in the same order and
//! wait for each other now and then; they fight for the same few pages meanwhile. A test of two nodes also
//! runs in two pairs at once, whose cells are beside each other: four nodes fight for each page.
//! Outcomes are kept in shared memory as well, and one node checks them at the end.

use std::arch::x86_64::{_mm_sfence, _mm_stream_si32};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering, compiler_fence, fence};

use fabric_pages::guest_memory::GuestMemory;
use fabric_sharing::SharedMemory;

use crate::mesh::{ALL, nodes};
use crate::programs::{Program, meet, over_bad_links};

/// Cells of 4 bytes in a page.
const CELLS: usize = 1024;
const PAGE: usize = 4096;

/// Pages of cells between which rounds alternate, so that a page seldom stays for two rounds.
const SPREAD: usize = 8;

/// Rounds between two meetings.
const LAP: usize = CELLS * SPREAD;

/// The cell of a round among those of all rounds: the next round's is in another page.
const fn cell(round: usize) -> usize {
    let in_lap = round % LAP;
    round - in_lap + in_lap % SPREAD * CELLS + in_lap / SPREAD
}

/// How many nodes run a test, and for how long.
#[derive(Clone, Copy)]
struct Shape {
    /// Of the test.
    roles: usize,
    /// Sets of nodes that run the test at the same time.
    sets: usize,
    /// Of each set: whole laps.
    rounds: usize,
}

impl Shape {
    const fn new(litmus: &Litmus, sets: usize, rounds: usize) -> Self {
        Self {
            roles: litmus.roles.len(),
            sets,
            rounds: rounds.next_multiple_of(LAP),
        }
    }

    const fn nodes(self) -> usize {
        self.roles * self.sets
    }

    /// Cells of each kind.
    const fn cells(self) -> usize {
        self.rounds * self.sets
    }

    const fn bytes(self) -> usize {
        PAGE + 2 * self.cells() * 4 + self.nodes() * self.rounds
    }
}

/// What a set of nodes sees of the memory: a page for meetings, then x and y, in which the cells of the
/// sets alternate, and the outcomes of each node.
#[derive(Clone, Copy)]
struct Cells {
    base: *mut u8,
    shape: Shape,
    set: usize,
}

impl Cells {
    fn at(self, offset: usize) -> *mut u8 {
        assert!(offset < self.shape.bytes());
        // SAFETY: inside the memory, as asserted.
        unsafe { self.base.add(offset) }
    }

    fn place(self, round: usize) -> usize {
        cell(round) * self.shape.sets + self.set
    }

    fn x(self, round: usize) -> &'static AtomicU32 {
        let offset = PAGE + self.place(round) * 4;
        // SAFETY: inside the memory, which outlives the roles, and aligned.
        unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }
    }

    fn y(self, round: usize) -> &'static AtomicU32 {
        let offset = PAGE + (self.shape.cells() + self.place(round)) * 4;
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }
    }

    /// What a role saw in a round: bit 0 for its first read, bit 1 for its second.
    fn seen(self, role: usize, round: usize) -> &'static AtomicU8 {
        let node = self.set * self.shape.roles + role;
        let offset = PAGE + 2 * self.shape.cells() * 4 + node * self.shape.rounds + round;
        // SAFETY: as above.
        unsafe { AtomicU8::from_ptr(self.at(offset)) }
    }
}

/// What a role does in a round, and what it reads.
type Role = fn(Cells, usize) -> (u32, u32);

/// A test: its roles, and whether an outcome of their reads is forbidden.
struct Litmus {
    name: &'static str,
    roles: &'static [Role],
    is_forbidden: fn(&[u8]) -> bool,
}

fn load(cell: &AtomicU32) -> u32 {
    let value = cell.load(Ordering::Relaxed);
    // The processor does the accesses in the order of the program.
    compiler_fence(Ordering::SeqCst);
    value
}

fn store(cell: &AtomicU32) {
    cell.store(1, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
}

fn stream(cell: &AtomicU32) {
    // SAFETY: the cell is aligned and mapped; the fence orders the store before later ones.
    unsafe {
        _mm_stream_si32(cell.as_ptr().cast(), 1);
        _mm_sfence();
    }
    compiler_fence(Ordering::SeqCst);
}

const SB: Litmus = Litmus {
    name: "store_buffering",
    roles: &[
        |cells, round| {
            store(cells.x(round));
            fence(Ordering::SeqCst);
            (load(cells.y(round)), 0)
        },
        |cells, round| {
            store(cells.y(round));
            fence(Ordering::SeqCst);
            (load(cells.x(round)), 0)
        },
    ],
    is_forbidden: |seen| seen[0] == 0 && seen[1] == 0,
};

const MP: Litmus = Litmus {
    name: "message_passing",
    roles: &[
        |cells, round| {
            store(cells.x(round));
            store(cells.y(round));
            (0, 0)
        },
        |cells, round| {
            let flag = load(cells.y(round));
            (flag, load(cells.x(round)))
        },
    ],
    is_forbidden: |seen| seen[1] == 1,
};

const STREAM: Litmus = Litmus {
    name: "streamed_message",
    roles: &[
        |cells, round| {
            stream(cells.x(round));
            store(cells.y(round));
            (0, 0)
        },
        |cells, round| {
            let flag = load(cells.y(round));
            (flag, load(cells.x(round)))
        },
    ],
    is_forbidden: |seen| seen[1] == 1,
};

const LB: Litmus = Litmus {
    name: "load_buffering",
    roles: &[
        |cells, round| {
            let read = load(cells.x(round));
            store(cells.y(round));
            (read, 0)
        },
        |cells, round| {
            let read = load(cells.y(round));
            store(cells.x(round));
            (read, 0)
        },
    ],
    is_forbidden: |seen| seen[0] == 1 && seen[1] == 1,
};

const IRIW: Litmus = Litmus {
    name: "independent_reads",
    roles: &[
        |cells, round| {
            store(cells.x(round));
            (0, 0)
        },
        |cells, round| {
            store(cells.y(round));
            (0, 0)
        },
        |cells, round| {
            let first = load(cells.x(round));
            (first, load(cells.y(round)))
        },
        |cells, round| {
            let first = load(cells.y(round));
            (first, load(cells.x(round)))
        },
    ],
    is_forbidden: |seen| seen[2] == 1 && seen[3] == 1,
};

/// Runs the role of a node, and checks all outcomes in node 0.
fn run_node(
    litmus: &Litmus,
    sets: usize,
    memory: &GuestMemory,
    node: usize,
    rounds: usize,
) -> String {
    let shape = Shape::new(litmus, sets, rounds);
    let (set, role) = (node / shape.roles, node % shape.roles);
    let of_set = |set| Cells {
        base: memory.guest_view(),
        shape,
        set,
    };
    let cells = of_set(set);
    for round in 0..shape.rounds {
        if round.is_multiple_of(LAP) {
            meet(memory, shape.nodes(), round / LAP);
        }
        let (first, second) = litmus.roles[role](cells, round);
        let seen = u8::try_from(first | second << 1).expect("zeroes and ones");
        cells.seen(role, round).store(seen, Ordering::Relaxed);
    }
    meet(memory, shape.nodes(), shape.rounds / LAP);
    if node > 0 {
        return String::new();
    }
    let mut outcomes = BTreeMap::<Vec<u8>, usize>::new();
    for cells in (0..sets).map(of_set) {
        for round in 0..shape.rounds {
            let roles = 0..shape.roles;
            let seen = roles.map(|role| cells.seen(role, round).load(Ordering::Relaxed));
            *outcomes.entry(seen.collect()).or_default() += 1;
        }
    }
    let forbidden = outcomes.keys().find(|seen| (litmus.is_forbidden)(seen));
    assert_eq!(forbidden, None, "{} in {outcomes:?}", litmus.name);
    format!("{outcomes:?}")
}

/// What the name of a test of two nodes ends with where two pairs of nodes run it.
const IN_PAIRS: &str = "_in_pairs";

/// The test with this name as a program.
pub fn program(name: &str) -> Option<Program> {
    macro_rules! programs {
        ($name:expr, $sets:literal: $($litmus:ident),*) => {{
            $(if $litmus.name == $name {
                return Some(Program {
                    roles: $litmus.roles.len() * $sets,
                    bytes: |rounds| Shape::new(&$litmus, $sets, rounds).bytes(),
                    run: |memory, node, rounds| run_node(&$litmus, $sets, memory, node, rounds),
                });
            })*
        }};
    }
    match name.strip_suffix(IN_PAIRS) {
        Some(name) => programs!(name, 2: SB, MP, STREAM, LB),
        None => programs!(name, 1: SB, MP, STREAM, LB, IRIW),
    }
    None
}

/// Runs a test with each role on a node of its own in this process.
fn run(litmus: &Litmus, rounds: usize) {
    let program = program(litmus.name).expect("each has a program");
    let count = u8::try_from(program.roles).expect("a few roles");
    let blocks = (program.bytes)(rounds).div_ceil(2 << 20);
    let nodes: Vec<SharedMemory> = nodes(count, blocks, ALL);
    std::thread::scope(|scope| {
        for (role, node) in nodes.iter().enumerate() {
            let run = program.run;
            scope.spawn(move || {
                let said = run(node.memory(), role, rounds);
                if role == 0 {
                    println!("{}: {said}", litmus.name);
                }
            });
        }
    });
}

const ROUNDS: usize = 20_000;

#[test]
fn store_buffering_with_fences() {
    run(&SB, ROUNDS);
}

#[test]
fn message_passing() {
    run(&MP, ROUNDS);
}

#[test]
fn message_passing_with_non_temporal_stores() {
    run(&STREAM, ROUNDS);
}

#[test]
fn load_buffering() {
    run(&LB, ROUNDS);
}

#[test]
fn independent_reads_of_independent_writes() {
    run(&IRIW, ROUNDS);
}

/// All tests, those of two nodes also in two pairs.
fn names() -> Vec<String> {
    let alone = [SB, MP, STREAM, LB, IRIW].map(|litmus| litmus.name.to_owned());
    let pairs = [SB, MP, STREAM, LB].map(|litmus| format!("{}{IN_PAIRS}", litmus.name));
    alone.into_iter().chain(pairs).collect()
}

#[test]
fn all_of_them_in_processes() {
    for name in names() {
        crate::processes::run(&name, ROUNDS, ALL);
    }
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn all_of_them_ten_million_times() {
    for name in names() {
        crate::processes::run(&name, 10_000_000, ALL);
    }
}

#[test]
fn all_of_them_over_links_that_are_slow_and_cut() {
    over_bad_links(names(), ROUNDS, ALL);
}

#[test]
#[ignore = "takes minutes; scripts/test --long runs it"]
fn all_of_them_many_times_over_links_that_are_slow_and_cut() {
    over_bad_links(names(), 1_000_000, ALL);
}
