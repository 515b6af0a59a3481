//! Faulty donors and networks: no wrong byte, no hang, a clear end.

use fabric_test_support::proxy::{Mischief, Proxy};
use fabric_test_support::*;
use fabric_transport::IN_FLIGHT_MAX;
use fabric_transport::control::ControlStream;
use fabric_transport::stream::Stream;
use fabric_wire::{FrameKind, LeaseGrant, ORPHAN_TIME, Token, lease_duration};
use memory_fabric::fabric::FabricEvent;
use memory_fabric::link::LinkEvent;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const GUEST: u64 = 48 * MIB;
const LOCAL: u64 = 16 * MIB;

/// Fills the guest's memory and reads it all back through a network that injects `mischief`, and
/// again with several threads at once.
fn memory_survives(mischief: Mischief) {
    let donor = donor(GUEST);
    let proxy = Proxy::new(donor.address(), mischief, 3);
    let mut config = config(GUEST, LOCAL, &[proxy.address]);
    config.checksum = true;
    // Every page is fetched separately.
    config.prefetch = false;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 1);
    verify(words, 1);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| verify(words, 1));
        }
    });
    assert!(proxy.mischief_done() > 0, "nothing was put to the test");
    running.fabric.shutdown();
}

/// The same with `mischief` in runs of prefetched pages.
fn runs_survive(mischief: Mischief, checksum: bool) {
    let donor = donor(GUEST);
    let proxy = Proxy::on(FrameKind::PagesData, donor.address(), mischief, 3);
    let mut config = config(GUEST, LOCAL, &[proxy.address]);
    config.checksum = checksum;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 9);
    for _ in 0..4 {
        verify(words, 9);
    }
    assert!(proxy.mischief_done() > 0, "nothing was put to the test");
    let used = running.fabric.stats().prefetch_used.get();
    assert!(used > 5_000, "{used} pages fetched ahead");
    running.fabric.shutdown();
}

#[test]
fn runs_survive_flipped_bits_and_cuts() {
    runs_survive(Mischief::FlipBit, true);
    runs_survive(Mischief::CutShort, false);
}

#[test]
fn runs_survive_wrong_lengths_and_kinds() {
    runs_survive(Mischief::Oversized, false);
    runs_survive(Mischief::ShortRun, false);
    runs_survive(Mischief::OtherKind, false);
}

#[test]
fn runs_survive_answers_to_nothing_and_answers_that_come_twice() {
    runs_survive(Mischief::WrongRequest, false);
    runs_survive(Mischief::Twice, false);
    runs_survive(Mischief::Garbage, false);
}

#[test]
fn runs_survive_another_sender_and_another_epoch() {
    runs_survive(Mischief::OtherSender, false);
    runs_survive(Mischief::OtherEpoch, false);
}

#[test]
fn runs_survive_another_order_and_silence() {
    runs_survive(Mischief::Reordered, false);
    runs_survive(Mischief::Silence, false);
}

#[test]
fn memory_survives_a_flipped_bit_on_the_network() {
    memory_survives(Mischief::FlipBit);
}

#[test]
fn memory_survives_frames_that_are_cut_short() {
    memory_survives(Mischief::CutShort);
}

#[test]
fn memory_survives_oversized_frames() {
    memory_survives(Mischief::Oversized);
}

#[test]
fn memory_survives_answers_to_nothing() {
    memory_survives(Mischief::WrongRequest);
}

#[test]
fn memory_survives_answers_that_come_twice() {
    memory_survives(Mischief::Twice);
}

#[test]
fn memory_survives_garbage() {
    memory_survives(Mischief::Garbage);
}

#[test]
fn memory_survives_a_peer_that_changes_its_version() {
    memory_survives(Mischief::OtherVersion);
}

#[test]
fn memory_survives_answers_in_another_order() {
    memory_survives(Mischief::Reordered);
}

#[test]
fn memory_survives_a_connection_that_falls_silent() {
    memory_survives(Mischief::Silence);
}

fn next_event(running: &Running) -> FabricEvent {
    running.events.recv_timeout(PATIENCE).expect("an event")
}

#[test]
fn a_donor_that_comes_back_with_its_memory_is_used_again() {
    let donor = donor(GUEST);
    let proxy = Proxy::new(donor.address(), Mischief::None, 0);
    let running = start(&config(GUEST, LOCAL, &[proxy.address]));
    let words = Words::of(&running.fabric);
    fill(words, 2);
    proxy.cut(true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| verify(words, 2));
        let event = next_event(&running);
        assert!(
            matches!(event, FabricEvent::Link(LinkEvent::Down { .. })),
            "{event:?}"
        );
        assert!(
            !reader.is_finished(),
            "read pages that no donor could have sent"
        );
        proxy.cut(false);
        let event = next_event(&running);
        assert!(
            matches!(event, FabricEvent::Link(LinkEvent::Up { .. })),
            "{event:?}"
        );
        reader.join().expect("every byte right");
    });
    running.fabric.shutdown();
}

/// A fabric whose donor is lost while a thread waits for a page.
///
/// That thread can continue only when the userfaultfd is closed, which the end of the process does
/// for a VM; so the fabric is leaked.
fn lost(running: Running, after: impl FnOnce()) -> String {
    let words = Words::of(&running.fabric);
    fill(words, 3);
    after();
    std::thread::spawn(move || verify(words, 3));
    let started = Instant::now();
    let reason = loop {
        match next_event(&running) {
            FabricEvent::Link(LinkEvent::Lost { reason, .. }) => break reason,
            FabricEvent::Link(LinkEvent::Down { .. }) => {}
            other => panic!("unexpected {other:?}"),
        }
    };
    assert!(started.elapsed() < PATIENCE / 2);
    std::mem::forget(running.fabric);
    reason
}

#[test]
fn a_donor_that_stays_away_is_lost_after_the_grace_time() {
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.grace = Duration::from_millis(700);
    let reason = lost(start(&config), || drop(donor));
    assert!(reason.contains("not back within 0.7 s"), "{reason}");
}

#[test]
fn a_donor_that_comes_back_without_its_memory_is_lost_at_once() {
    let first = donor(GUEST);
    let second = donor(GUEST);
    let proxy = Proxy::new(first.address(), Mischief::None, 0);
    let running = start(&config(GUEST, LOCAL, &[proxy.address]));
    let reason = lost(running, || {
        proxy.redirect(second.address());
        drop(first);
    });
    assert!(
        reason.contains("no longer has this VM's memory"),
        "{reason}"
    );
}

#[test]
fn an_outage_that_is_over_does_not_count_for_the_next() {
    let donor = donor(GUEST);
    let proxy = Proxy::new(donor.address(), Mischief::None, 0);
    let mut config = config(GUEST, LOCAL, &[proxy.address]);
    config.grace = Duration::from_secs(4);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 8);
    // Longer than the grace time in total, but each one shorter.
    for _ in 0..5 {
        proxy.cut(true);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| verify(words, 8));
            let event = next_event(&running);
            assert!(
                matches!(event, FabricEvent::Link(LinkEvent::Down { .. })),
                "{event:?}"
            );
            let early = running.events.recv_timeout(Duration::from_secs(1));
            assert!(early.is_err(), "{early:?}");
            proxy.cut(false);
            let event = next_event(&running);
            assert!(
                matches!(event, FabricEvent::Link(LinkEvent::Up { .. })),
                "{event:?}"
            );
            reader.join().expect("every byte right");
        });
    }
    running.fabric.shutdown();
}

/// Why the donor is lost behind a network that does `mischief` to pages for ever.
fn lost_behind(mischief: Mischief) -> (String, Proxy) {
    let donor = donor(GUEST);
    let proxy = Proxy::new(donor.address(), mischief, 0);
    let mut config = config(GUEST, LOCAL, &[proxy.address]);
    config.grace = Duration::from_secs(1);
    // So that every page comes by itself.
    config.prefetch = false;
    let running = start(&config);
    fill(Words::of(&running.fabric), 5);
    let words = Words::of(&running.fabric);
    std::thread::spawn(move || verify(words, 5));
    let reason = loop {
        match next_event(&running) {
            FabricEvent::Link(LinkEvent::Lost { reason, .. }) => break reason,
            FabricEvent::Link(_) => {}
            other => panic!("unexpected {other:?}"),
        }
    };
    assert!(reason.contains("not back within 1 s"), "{reason}");
    std::mem::forget((running.fabric, donor));
    (reason, proxy)
}

#[test]
fn a_donor_that_takes_connections_and_sends_no_page_is_lost_too() {
    let (_, proxy) = lost_behind(Mischief::NoPage);
    let attempts = proxy.mischief_done();
    assert!(
        attempts < 50,
        "{attempts} attempts in a second: no pause between them"
    );
}

#[test]
fn a_donor_that_sends_all_pages_but_one_is_lost_too() {
    let (reason, proxy) = lost_behind(Mischief::LeftOut);
    assert!(reason.contains("was not answered within 5 s"), "{reason}");
    assert!(proxy.mischief_done() > 1, "it was asked for once only");
}

#[test]
fn more_faults_than_requests_fit_on_a_connection_are_all_served() {
    let donor = donor(GUEST);
    let proxy = Proxy::new(donor.address(), Mischief::None, 0);
    let running = start(&config(GUEST, LOCAL, &[proxy.address]));
    let words = Words::of(&running.fabric);
    fill(words, 6);
    proxy.cut(true);
    std::thread::scope(|scope| {
        // The first pages were evicted long ago.
        let readers: Vec<_> = (0..IN_FLIGHT_MAX + 30)
            .map(|page| scope.spawn(move || words.at(page, 0).load(Ordering::Relaxed)))
            .collect();
        let event = next_event(&running);
        assert!(
            matches!(event, FabricEvent::Link(LinkEvent::Down { .. })),
            "{event:?}"
        );
        proxy.cut(false);
        for reader in readers {
            reader.join().expect("served");
        }
    });
    verify(words, 6);
    running.fabric.shutdown();
}

#[test]
fn an_idle_vm_whose_connections_break_keeps_its_memory() {
    let donor = donor(GUEST);
    let mut config = config(GUEST, LOCAL, &[donor.address()]);
    config.grace = Duration::from_secs(60);
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 7);
    donor.break_connections();
    // Idle for longer than a lease without a control connection lasts.
    let idle = ORPHAN_TIME + Duration::from_secs(2);
    let event = running.events.recv_timeout(idle);
    assert!(event.is_err(), "{event:?}");
    assert_eq!(donor.pool().leases(), 1);
    verify(words, 7);
    running.fabric.shutdown();
}

#[test]
fn a_vm_that_is_shut_out_for_less_than_its_grace_time_keeps_its_memory() {
    let grace = 2 * ORPHAN_TIME;
    let donor = donor_for(GUEST, lease_duration(grace));
    let proxy = Proxy::new(donor.address(), Mischief::None, 0);
    let mut config = config(GUEST, LOCAL, &[proxy.address]);
    config.grace = grace;
    let running = start(&config);
    let words = Words::of(&running.fabric);
    fill(words, 8);
    // Whoever is between them closes all connections, as the kernel of a dead VM would.
    proxy.cut(true);
    let until = Instant::now() + ORPHAN_TIME + Duration::from_secs(2);
    let left = || until.saturating_duration_since(Instant::now());
    while let Ok(event) = running.events.recv_timeout(left()) {
        let lost = matches!(event, FabricEvent::Link(LinkEvent::Lost { .. }));
        assert!(!lost, "{event:?}");
    }
    assert_eq!(donor.pool().leases(), 1);
    proxy.cut(false);
    verify(words, 8);
    running.fabric.shutdown();
}

#[test]
fn an_absent_donor_is_named() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    drop(listener);
    let text = refusal(&config(GUEST, LOCAL, &[address]));
    assert!(
        text.contains(&address.to_string()) && text.contains("ssi-hv node"),
        "{text}"
    );
}

#[test]
fn a_donor_that_lends_too_little_is_an_error_with_numbers() {
    let donor = donor(16 * MIB);
    let text = refusal(&config(GUEST, LOCAL, &[donor.address()]));
    assert!(text.contains("48 MiB") && text.contains("16 MiB"), "{text}");
    assert_eq!(donor.pool().lent_bytes(), 0, "the lease was not given back");
}

#[test]
fn a_donor_that_speaks_something_else_is_an_error() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let _ = stream.read(&mut [0; 512]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    });
    let text = refusal(&config(GUEST, LOCAL, &[address]));
    assert!(text.contains("not an ssi-hv node"), "{text}");
}

/// Such a number would also determine the deadline of RDMA set-up and the size of the home table.
#[test]
fn a_grant_of_more_than_was_asked_is_refused_with_value_and_limit() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    let donor = std::thread::spawn(move || {
        for bytes in [GUEST + 4096, u64::MAX] {
            let (stream, peer) = listener.accept().expect("a client");
            let mut control = ControlStream::accepted(Stream::Tcp(stream.into()), peer);
            let patience = Duration::from_secs(20);
            let (frame, _) = control.receive(patience).expect("a request");
            assert_eq!(frame.kind, FrameKind::Lease);
            let grant = LeaseGrant {
                token: Token([7; 16]),
                bytes,
                duration_ms: 30_000,
            };
            control.send(FrameKind::Granted, &grant).expect("sent");
            control
                .receive(patience)
                .expect_err("nothing of that lease is used");
        }
    });
    for bytes in [GUEST + 4096, u64::MAX] {
        let text = refusal(&config(GUEST, LOCAL, &[address]));
        assert!(
            text.contains(&format!("{bytes} bytes granted, {GUEST} were asked")),
            "{text}"
        );
    }
    donor.join().expect("the donor");
}

#[test]
fn a_donor_that_never_answers_is_an_error_within_the_deadline() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    let address = listener.local_addr().expect("bound");
    let started = Instant::now();
    let text = refusal(&config(GUEST, LOCAL, &[address]));
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
    assert!(text.contains("timed out"), "{text}");
}

#[test]
fn a_lease_ends_with_its_vm() {
    let donor = donor(GUEST);
    let running = start(&config(GUEST, LOCAL, &[donor.address()]));
    fill(Words::of(&running.fabric), 4);
    assert_eq!(donor.pool().leases(), 1);
    running.fabric.shutdown();
    assert_eq!((donor.pool().leases(), donor.pool().lent_bytes()), (0, 0));
}
