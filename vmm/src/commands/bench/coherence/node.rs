//! A node of the benchmark: a process that shares a memory with others and carries out commands.

use std::io::{BufRead, BufReader, Write as _, stdin, stdout};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use crossbeam_channel::{Receiver, Sender, bounded};
use memory_fabric::BLOCK_BYTES;
use memory_fabric::compute::{Layout, Listeners, Membership, SharedGuest, SharingError};
use memory_fabric::fabric::{DonorAddress, Fabric};
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::rdma::Settings;
use ssi_hv::exit::ExitCode;
use ssi_hv::stderr::{self, Stderr};

use super::floor;
use super::protocol::{
    Answer, Command, Counters, Pages, Request, Setup, UsedDonor, Work, hear, say,
};
use crate::commands::Failure;
use crate::commands::bench::fault;
use crate::commands::bench::placement;
use crate::commands::bench::random::next;
use crate::commands::bench::usage::processor_time;
use crate::commands::bench::view::View;

/// Pages over which the migratory, the read-mostly and the private work go.
pub(super) const WORK_PAGES: usize = 64;

/// Names the VM. The nodes of another run do not know the secret.
const VM: [u8; 16] = *b"bench coherence\0";

/// Counters of a page that the migratory work uses.
const WORDS: usize = 8;

/// Serves the program that started this process, over its standard input and output.
pub fn serve() -> Result<ExitCode, Failure> {
    run()?;
    Ok(ExitCode::Success)
}

fn run() -> Result<()> {
    let (mut input, mut output) = (BufReader::new(stdin()), stdout());
    // Without it there is nothing to end yet.
    let Some(setup): Option<Setup> = hear(&mut input)? else {
        return Ok(());
    };
    let commands = commands(input)?;
    placement::use_only(&setup.cpus)?;
    let address = setup.rdma.unwrap_or(Ipv4Addr::LOCALHOST.into());
    let listeners = match setup.tls {
        true => Listeners::secured(address, VM, setup.me)?,
        false => Listeners::bind(address)?,
    };
    let bytes = u64::from(setup.blocks) * BLOCK_BYTES;
    // Dropped after the memory that is shared, which uses its connections.
    let fabric = setup.donor.map(|donor| lease(donor, bytes)).transpose()?;
    say(&mut output, &Answer::Ports(listeners.ports()?))?;
    let Command::Connect(table) = commands.recv()? else {
        bail!("the first command has to be the table of all nodes");
    };
    let memory = match &fabric {
        Some(fabric) => Arc::clone(fabric.memory()),
        None => Arc::new(GuestMemory::new(usize::try_from(bytes)?)?),
    };
    let depot = fabric.as_ref().and_then(Fabric::take_depot);
    let membership = Membership {
        me: setup.me,
        vm: VM,
        secret: setup.secret,
        table,
        ranges: std::iter::once(0..bytes).collect(),
        merge_tables: false,
        layout: Layout::Mixed,
        rdma: setup.rdma.map(|_| Settings::default()),
    };
    let failed = move |error: SharingError| {
        // Threads that wait for a page would wait for ever.
        let _ = writeln!(Stderr::default(), "node {}: {error}", setup.me);
        std::process::exit(1);
    };
    // No vCPUs use the connections of these.
    let (shared, _links) =
        SharedGuest::start(membership, listeners, Arc::clone(&memory), depot, failed)?;
    let view = View::new(&memory);
    say(&mut output, &Answer::Done)?;
    loop {
        let answer = match commands.recv()? {
            Command::Connect(_) => bail!("the nodes are connected"),
            Command::Touch { pages, write } => Answer::Times(touch(&view, pages, write)?),
            Command::Fill(pages) => {
                pages.iter().for_each(|page| view.fill_page(page));
                Answer::Done
            }
            Command::Compare(pages) => compare(&view, pages)?,
            Command::Sum(pages) => {
                let words = (0..WORDS).flat_map(|word| pages.iter().map(move |page| (page, word)));
                let counters = words.map(|(page, word)| view.word(page, word));
                let loaded = counters.map(|counter| counter.load(Ordering::Relaxed));
                Answer::Count(loaded.sum())
            }
            Command::Work {
                what,
                first,
                milliseconds,
            } => {
                let time = Duration::from_millis(milliseconds);
                Answer::Count(work(&view, what, first, setup.me.into(), time))
            }
            Command::FloorServe(donor) => Answer::Listening(floor::serve(donor)?),
            Command::Floor { far, what } => Answer::Times(floor::measure(far, what)?),
            Command::Stats => Answer::Stats(counters(&shared)?),
        };
        say(&mut output, &answer)?;
    }
}

/// Starts a thread that reads what is requested. It ends this process as soon as the one that
/// started it has ended: other threads may wait for pages that nobody sends any more.
fn commands(input: impl BufRead + Send + 'static) -> Result<Receiver<Command>> {
    let (sender, commands) = bounded(1);
    let read = move || {
        if let Err(error) = read_requests(input, &sender) {
            let _ = writeln!(Stderr::default(), "a request to a node: {error:#}");
        }
        std::process::exit(1);
    };
    let thread = std::thread::Builder::new().name("requests".into());
    thread.spawn(read).context("cannot start a thread")?;
    Ok(commands)
}

/// Passes on commands until there are no more requests.
fn read_requests(mut input: impl BufRead, commands: &Sender<Command>) -> Result<()> {
    while let Some(request) = hear(&mut input)? {
        match request {
            // Once the other thread has failed, it reports why, and does nothing more.
            Request::Do(command) => drop(commands.send(command)),
            Request::Hush => {
                stderr::silence();
                say(&mut stdout(), &Answer::Hushed)?;
            }
        }
    }
    Ok(())
}

/// Obtains a lease from a donor for a shared memory, as `ssi-hv run` does.
fn lease(donor: UsedDonor, memory_bytes: u64) -> Result<Fabric> {
    let address = DonorAddress {
        name: None,
        address: donor.address,
        fingerprint: None,
        zone: None,
        bytes: Some(donor.lent_bytes),
    };
    let config = fault::plain(memory_bytes, donor.local_bytes, vec![address])?;
    let observer = fault::observer();
    Ok(Fabric::start_shared(&config, donor.lent_bytes, &observer)?)
}

fn counters(shared: &SharedGuest) -> Result<Counters> {
    let stats = shared.stats();
    Ok(Counters {
        transfers: stats.from_member.get(),
        reads: stats.reads.get(),
        writes: stats.writes.get(),
        upgrades: stats.upgrades.get(),
        invalidated: stats.invalidated.get(),
        holds: stats.holds.get(),
        early: stats.early.get(),
        from_depot: stats.from_depot.get(),
        cpu_us: u64::try_from(processor_time()?.as_micros())?,
    })
}

/// Reads or writes a word of each page, and returns the nanoseconds of each access.
pub(super) fn touch(view: &View, pages: Pages, write: bool) -> Result<Vec<u64>> {
    let mut times = Vec::with_capacity(pages.count);
    for page in pages.iter() {
        let word = view.word(page, WORDS);
        let started = Instant::now();
        if write {
            word.fetch_add(1, Ordering::Relaxed);
        } else {
            word.load(Ordering::Relaxed);
        }
        times.push(u64::try_from(started.elapsed().as_nanos())?);
    }
    Ok(times)
}

/// Reads a word of each page, and compares its bytes when the time is taken.
fn compare(view: &View, pages: Pages) -> Result<Answer> {
    let mut times = Vec::with_capacity(pages.count);
    let mut corrupt_bytes = 0;
    for page in pages.iter() {
        let started = Instant::now();
        view.word(page, 0).load(Ordering::Relaxed);
        times.push(u64::try_from(started.elapsed().as_nanos())?);
        corrupt_bytes += view.corrupt_bytes(page);
    }
    Ok(Answer::Compared {
        times,
        corrupt_bytes,
    })
}

/// Does a kind of work for some time. Returns the number of increments, or of pages that were read
/// where nothing is incremented.
fn work(view: &View, what: Work, first: usize, me: usize, time: Duration) -> u64 {
    let until = Instant::now() + time;
    let mut random = me as u64 + 1;
    let mut done = 0;
    // The time is looked at now and then only: it costs as much as an access.
    while done % 64 != 0 || Instant::now() < until {
        match what {
            Work::PingPong => {
                view.word(first, 0).fetch_add(1, Ordering::Relaxed);
            }
            Work::FalseSharing => {
                view.word(first, me % WORDS).fetch_add(1, Ordering::Relaxed);
            }
            Work::Private => {
                let page = first + (me * WORK_PAGES) + next(&mut random) % WORK_PAGES;
                view.word(page, 0).fetch_add(1, Ordering::Relaxed);
            }
            Work::ReadMostly => {
                let page = first + next(&mut random) % WORK_PAGES;
                let word = view.word(page, 0);
                if done % 1000 == 999 {
                    word.fetch_add(1, Ordering::Relaxed);
                } else {
                    word.load(Ordering::Relaxed);
                }
            }
            Work::Migratory => {
                let page = first + next(&mut random) % WORK_PAGES;
                let words = (0..WORDS).map(|word| view.word(page, word));
                std::hint::black_box(words.map(|word| word.load(Ordering::Relaxed)).sum::<u64>());
                for word in 0..WORDS {
                    view.word(page, word).fetch_add(1, Ordering::Relaxed);
                }
                done += WORDS as u64 - 1;
            }
            Work::ProducerConsumer => {
                let page = first + 1 + usize::try_from(done).unwrap_or(0) % (WORK_PAGES - 1);
                let lap = done / (WORK_PAGES as u64 - 1) + 1;
                if me == 0 {
                    for word in 1..WORDS {
                        view.word(page, word).store(lap, Ordering::Relaxed);
                    }
                    view.word(page, 0).store(lap, Ordering::Release);
                } else {
                    while view.word(page, 0).load(Ordering::Acquire) < lap {
                        if Instant::now() >= until {
                            return done;
                        }
                        std::hint::spin_loop();
                    }
                }
            }
        }
        done += 1;
    }
    done
}
