//! A node of the benchmark: a process that shares a memory with others and carries out commands.

use std::io::{BufReader, stdin, stdout};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use fabric_coherence::{Member, Members};
use fabric_identity::Fingerprint;
use fabric_identity::pinned::PinnedIdentity;
use fabric_peers::ring::verbs::VerbsRings;
use fabric_peers::tcp::{RdmaPeers, Secret, TcpPeers, TcpPeersConfig};
use fabric_sharing::{Config, SharedMemory};
use memory_fabric::NodeId;
use memory_fabric::compute::TlsSecurity;
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::page::PAGE_SIZE;
use memory_fabric::rdma::Settings;
use ssi_hv::exit::ExitCode;

use super::floor;
use super::protocol::{Answer, Command, Counters, Pages, Setup, Work, hear, say};
use crate::commands::Failure;
use crate::commands::bench::fault::next;
use crate::commands::bench::usage::processor_time;
use crate::commands::bench::view::View;

/// Pages over which the migratory, the read-mostly and the private work go.
pub(super) const WORK_PAGES: usize = 64;

/// Counters of a page that the migratory work uses.
const WORDS: usize = 8;

/// Serves the program that started this process, over its standard input and output.
pub fn serve() -> Result<ExitCode, Failure> {
    run()?;
    Ok(ExitCode::Success)
}

fn run() -> Result<()> {
    let (mut input, mut output) = (BufReader::new(stdin().lock()), stdout().lock());
    let setup: Setup = hear(&mut input)?;
    let address = setup.rdma.unwrap_or(Ipv4Addr::LOCALHOST.into());
    let listener = TcpListener::bind((address, 0))?;
    say(&mut output, &Answer::Listening(listener.local_addr()?))?;
    let identity = match setup.tls {
        true => {
            let subject = format!("spiffe://bench/ssi-hv/node/{}", setup.me).parse()?;
            let identity = PinnedIdentity::generate(&subject)?;
            let certificate = identity.fingerprint().bytes();
            say(&mut output, &Answer::Certificate(certificate))?;
            Some(identity)
        }
        false => None,
    };
    let Command::Connect {
        addresses,
        certificates,
    } = hear(&mut input)?
    else {
        bail!("the first command has to be the addresses of the nodes");
    };
    let ids: Vec<_> = (0..setup.nodes).map(NodeId).collect();
    let members = Members::new(&ids)?;
    let me = Member::at(setup.me).context("no such node")?;
    let memory = Arc::new(GuestMemory::new((setup.blocks as usize) << 21)?);
    let mut config = Config::new(me, members.all());
    let pages = u32::try_from(memory.bytes() / PAGE_SIZE)?;
    let mut connect = TcpPeersConfig::new(me, members, addresses, listener, pages);
    connect.secret = Secret(setup.secret);
    if let Some(identity) = &identity {
        let table = certificates.into_iter().map(Fingerprint::from).collect();
        connect.security = Some(TlsSecurity::shared(identity, setup.me, table)?);
    }
    connect.rdma = setup.rdma.map(|_| RdmaPeers {
        rings: Arc::new(VerbsRings::new(Settings::default())),
        is_demanded: true,
    });
    let peers = TcpPeers::connect(connect)?;
    config.local_pages = setup.local_pages;
    let failed = Box::new(move |failure: fabric_sharing::Failure, _| {
        // Threads that wait for a page would wait for ever.
        eprintln!("node {}: {}", setup.me, fabric_host::describe(&failure));
        std::process::exit(1);
    });
    let shared = SharedMemory::start(config, memory, peers, failed)?;
    let view = View::new(shared.memory());
    say(&mut output, &Answer::Done)?;
    loop {
        let answer = match hear(&mut input)? {
            Command::Connect { .. } => bail!("the nodes are connected"),
            Command::Touch { pages, write } => Answer::Times(touch(&view, pages, write)?),
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
            Command::FloorServe => Answer::Listening(floor::serve()?),
            Command::Floor { far, what } => Answer::Times(floor::measure(far, what)?),
            Command::Stats => Answer::Stats(counters(&shared)?),
            Command::End => {
                say(&mut output, &Answer::Done)?;
                return Ok(());
            }
        };
        say(&mut output, &answer)?;
    }
}

fn counters(shared: &SharedMemory) -> Result<Counters> {
    let stats = shared.stats();
    Ok(Counters {
        transfers: stats.from_member.get(),
        reads: stats.reads.get(),
        writes: stats.writes.get(),
        upgrades: stats.upgrades.get(),
        invalidated: stats.invalidated.get(),
        holds: stats.holds.get(),
        early: stats.early.get(),
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
