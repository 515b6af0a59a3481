use super::*;
use crate::donor::policy::{Amounts, Rule};
use crate::stream::Closer;
use crate::wire::{ORPHAN_TIME, TrafficClass, lease_duration};
use std::net::{TcpListener, TcpStream};

const SECOND: Duration = Duration::from_secs(1);
const PAGE: u64 = PAGE_SIZE as u64;

fn pool(pages: u64) -> Pool {
    Pool::new(pages * PAGE, SECOND * 30)
}

#[test]
fn memory_is_zero_again_when_it_is_lent_again() {
    let pool = pool(4);
    let lease = pool
        .lend("a".into(), 4 * PAGE, false, SECOND)
        .expect("free");
    lease.write(0, &[0xff; PAGE_SIZE]).expect("inside");
    pool.end(&lease.token).expect("is there");
    drop(lease);
    let lease = pool
        .lend("b".into(), 4 * PAGE, false, SECOND)
        .expect("free again");
    let mut page = [1; PAGE_SIZE];
    lease.read(0, &mut page).expect("inside");
    assert_eq!(page, [0; PAGE_SIZE]);
}

/// `VmFlags` in `/proc/self/smaps` (Linux, Documentation/filesystems/proc.rst): `dd` is memory that
/// core dumps omit.
#[test]
fn a_core_dump_omits_lent_memory() {
    let pool = pool(3);
    let lease = pool
        .lend("a".into(), 3 * PAGE, false, SECOND)
        .expect("free");
    let address = lease.memory.as_ptr() as usize;
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("of Linux");
    let holds_it = |line: &str| {
        let range = line.split(' ').next()?.split_once('-')?;
        let [start, end] = [range.0, range.1].map(|part| usize::from_str_radix(part, 16));
        Some((start.ok()?..end.ok()?).contains(&address))
    };
    let mut lines = smaps.lines();
    let header = lines.find(|line| holds_it(line) == Some(true));
    assert!(header.is_some(), "no mapping at {address:#x}");
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:"));
    let mut flags = flags.expect("flags of the mapping").split_whitespace();
    assert!(flags.any(|flag| flag == "dd"));
}

#[test]
fn more_than_is_free_is_refused_or_cut_as_asked() {
    let pool = pool(4);
    let error = pool.lend("a".into(), 5 * PAGE, false, SECOND).unwrap_err();
    assert!(
        matches!(error, LeaseError::NoMemory { free: 16384, .. }),
        "{error}"
    );
    assert_eq!(
        pool.lend("a".into(), 5 * PAGE, true, SECOND)
            .expect("cut")
            .bytes(),
        4 * PAGE
    );
    assert!(pool.lend("b".into(), PAGE, true, SECOND).is_err());
    assert!(matches!(
        pool.lend("b".into(), 100, true, SECOND),
        Err(LeaseError::Size(100))
    ));
}

#[test]
fn dropped_pages_are_zero_and_their_neighbours_are_not() {
    let pool = pool(4);
    let lease = pool
        .lend("a".into(), 4 * PAGE, false, SECOND)
        .expect("free");
    for number in 0..4 {
        lease.write(number * PAGE, &[7; PAGE_SIZE]).expect("inside");
    }
    lease.drop_pages(PAGE, 2).expect("inside");
    for (number, wanted) in [7, 0, 0, 7].into_iter().enumerate() {
        let mut page = [1; PAGE_SIZE];
        lease.read(number as u64 * PAGE, &mut page).expect("inside");
        assert_eq!(page, [wanted; PAGE_SIZE], "page {number}");
    }
    assert_eq!(lease.status().pages_dropped, 2);
    for (offset, pages) in [
        (0, 0),
        (1, 1),
        (0, 5),
        (4 * PAGE, 1),
        (!4095, 1),
        (0, u32::MAX),
    ] {
        let result = lease.drop_pages(offset, pages);
        assert!(result.is_err(), "{offset:#x} {pages}");
    }
}

#[test]
fn a_lease_that_is_not_renewed_ends() {
    let pool = pool(4);
    let lease = pool.lend("late".into(), PAGE, false, SECOND).expect("free");
    assert!(pool.end_expired(Instant::now()).is_empty());
    assert_eq!(pool.end_expired(Instant::now() + SECOND * 2), ["late"]);
    assert!(pool.find(&lease.token).is_none());
    assert_eq!(pool.lent_bytes(), PAGE, "its memory is still mapped");
    drop(lease);
    assert_eq!(pool.lent_bytes(), 0);
}

#[test]
fn a_lease_lasts_longer_by_the_time_in_which_nobody_could_renew_it() {
    let pool = pool(4);
    let lease = pool.lend("late".into(), PAGE, false, SECOND).expect("free");
    lease.forsake(0);
    pool.postpone_ends(SECOND * 2);
    assert!(!lease.is_forsaken(Instant::now() + SECOND));
    assert!(lease.is_forsaken(Instant::now() + SECOND * 3));
    assert!(pool.end_expired(Instant::now() + SECOND).is_empty());
    assert_eq!(pool.end_expired(Instant::now() + SECOND * 4), ["late"]);
}

#[test]
fn pieces_are_inside_the_lease_and_at_eighths_of_pages() {
    let pool = pool(2);
    let lease = pool
        .lend("a".into(), 2 * PAGE, false, SECOND)
        .expect("free");
    let piece = [7; 1024];
    for offset in [1, 511, 2 * PAGE - 512, 2 * PAGE, u64::MAX, u64::MAX - 511] {
        let written = lease.write_piece(offset, &piece);
        assert!(written.is_err(), "{offset:#x}");
        let read = lease.read_pieces(offset, 1024, &mut Vec::new());
        assert!(read.is_err(), "{offset:#x}");
    }
    lease.write_piece(PAGE - 512, &piece).expect("inside");
    let mut found = Vec::new();
    lease
        .read_pieces(PAGE - 1024, 2048, &mut found)
        .expect("inside");
    assert_eq!(found, [[0; 512], [7; 512], [7; 512], [0; 512]].concat());
    let counts = lease.status();
    assert_eq!((counts.pages_written, counts.pages_read), (1, 1));
}

#[test]
fn offsets_outside_or_across_pages_are_refused() {
    let pool = pool(2);
    let lease = pool
        .lend("a".into(), 2 * PAGE, false, SECOND)
        .expect("free");
    let mut page = [0; PAGE_SIZE];
    for offset in [1, PAGE + 8, 2 * PAGE, u64::MAX, u64::MAX - 4095] {
        assert!(lease.read(offset, &mut page).is_err(), "{offset:#x}");
        assert!(lease.write(offset, &page).is_err(), "{offset:#x}");
        assert!(
            lease.read_run(offset, 1, &mut Vec::new()).is_err(),
            "{offset:#x}"
        );
    }
    let mut run = Vec::new();
    assert!(lease.read_run(PAGE, 2, &mut run).is_err() && run.is_empty());
    assert!(lease.read_run(0, 2, &mut run).is_ok());
    assert_eq!(run, [0; 2 * PAGE_SIZE]);
    assert_eq!(lease.status().pages_read, 2, "only what was sent counts");
}

/// The epoch in which connections are made here.
const EPOCH: u64 = 5;

/// A lease of one page with a connection that does not end by itself, and the VM's end of that.
fn hanging(pool: &Pool, vm: &str) -> (Arc<Lease>, SessionKind, TcpStream) {
    let lease = pool.lend(vm.into(), PAGE, false, SECOND);
    let lease = lease.expect("free memory");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let kind = SessionKind::Pages(TrafficClass::Urgent);
    let began = lease.begin_session(kind, Closer::Tcp(stream.into()), EPOCH, Duration::ZERO);
    began.expect("the first of its kind");
    let (peer, _) = listener.accept().expect("connected");
    (lease, kind, peer)
}

#[test]
fn a_connection_that_does_not_end_is_not_waited_for_for_ever() {
    let pool = pool(1);
    let (lease, kind, _peer) = hanging(&pool, "vm");
    lease.close();
    let soon = Instant::now() + Duration::from_millis(1);
    assert!(!lease.has_closed_by(soon), "it has not ended");
    Arc::clone(&lease).end_session(kind, EPOCH);
    assert!(lease.has_closed_by(soon));
}

#[test]
fn a_connection_of_an_older_epoch_replaces_none() {
    let pool = pool(1);
    let (lease, kind, peer) = hanging(&pool, "vm");
    let begin = |kind, epoch| {
        let stream = peer.try_clone().expect("descriptors");
        lease.begin_session(kind, Closer::Tcp(stream.into()), epoch, Duration::ZERO)
    };
    let refused = |epoch: u64, newest: u64| match begin(kind, epoch) {
        Err(SessionRefused::StaleEpoch {
            epoch: found,
            newest: known,
        }) => assert_eq!((found, known), (epoch, newest)),
        other => panic!("{epoch}: {other:?}"),
    };
    refused(EPOCH - 1, EPOCH);
    // The existing connection was not replaced, and carried newer requests.
    let busy = begin(kind, EPOCH);
    assert!(matches!(busy, Err(SessionRefused::Busy(_))), "{busy:?}");
    Arc::clone(&lease).end_session(kind, EPOCH + 2);
    refused(EPOCH + 1, EPOCH + 2);
    // Other classes have other connections.
    begin(SessionKind::Pages(TrafficClass::Bulk), EPOCH).expect("the first of its kind");
    begin(kind, EPOCH + 2).expect("in the newest epoch");
}

#[test]
fn leases_that_hang_are_waited_for_together() {
    const LEASES: u32 = 10;
    let mut pool = pool(LEASES.into());
    pool.closing_time_max = Duration::from_millis(300);
    let mut leases: Vec<_> = (0..LEASES).map(|_| hanging(&pool, "vm")).collect();
    // The last one ends when it is shut down, before the first one times out.
    let (last, kind, mut peer) = leases.pop().expect("some");
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            peer.set_read_timeout(Some(SECOND * 30)).expect("is set");
            assert_eq!(peer.read(&mut [0]).expect("in time"), 0);
            last.end_session(kind, EPOCH);
        });
        pool.end_all();
    });
    let took = begin.elapsed();
    let (once, each) = (pool.closing_time_max, pool.closing_time_max * (LEASES - 1));
    assert!(took >= once && took < each, "{took:?}");
    assert_eq!(pool.leases(), 0);
    // A hanging connection may still use its memory.
    assert_eq!(pool.lent_bytes(), u64::from(LEASES - 1) * PAGE);
    // As `ibv_reg_mr` of much memory does, which ends eventually.
    for (lease, kind, _peer) in leases {
        lease.end_session(kind, EPOCH);
    }
    assert_eq!(pool.lent_bytes(), 0);
}

#[test]
fn expiry_waits_for_no_connection_and_counts_what_it_does_until_it_ends() {
    let pool = pool(2);
    let (lease, kind, _peer) = hanging(&pool, "hangs");
    let mut now = Instant::now() + SECOND * 2;
    assert_eq!(pool.end_expired(now), ["hangs"]);
    let other = pool.lend("other".into(), PAGE, false, SECOND);
    drop(other.expect("the other page is free"));
    now += SECOND;
    assert_eq!(pool.end_expired(now), ["other"], "the first hangs");
    assert_eq!((pool.expired.get(), pool.lent_bytes()), (2, PAGE));
    let mut page = [1; PAGE_SIZE];
    lease.read(0, &mut page).expect("it has its memory");
    assert_eq!(pool.status().pages_read, 1);
    lease.end_session(kind, EPOCH);
    assert!(pool.end_expired(now).is_empty());
    assert_eq!((pool.lent_bytes(), pool.status().pages_read), (0, 1));
}

#[test]
fn a_deregistration_that_hangs_delays_the_expiry_of_no_lease() {
    let pool = pool(2);
    let lend = |vm: &str| pool.lend(vm.into(), PAGE, false, SECOND);
    let hangs = lend("hangs").expect("free memory");
    let (end, returns) = crossbeam_channel::bounded(0);
    hangs.hang_until(returns);
    drop((hangs, lend("other").expect("free memory")));
    let now = Instant::now() + SECOND * 2;
    // Twice: the lease is closed in between.
    let mut vms = pool.end_expired(now);
    vms.sort();
    assert_eq!(vms, ["hangs", "other"]);
    assert!(pool.end_expired(now + CLOSING_TIME_MAX).is_empty());
    assert_eq!(pool.lent_bytes(), PAGE, "of the lease that is registered");
    drop(end);
    let deadline = Instant::now() + SECOND * 30;
    while pool.lent_bytes() > 0 {
        assert!(Instant::now() < deadline, "its memory stays lent");
        std::thread::yield_now();
    }
}

#[test]
fn memory_that_an_adapter_may_still_access_stays_lent() {
    let pool = pool(1);
    let lease = pool.lend("a".into(), PAGE, false, SECOND).expect("free");
    let (fails, result) = crossbeam_channel::bounded(1);
    lease.hang_until(result);
    fails.send(()).expect("room");
    assert_eq!(pool.end_expired(Instant::now() + SECOND * 2), ["a"]);
    assert!(lease.has_closed_by(Instant::now() + SECOND * 30));
    drop(lease);
    assert_eq!(pool.lent_bytes(), PAGE);
}

#[test]
fn a_lease_ends_soon_when_the_connection_that_renewed_it_last_is_closed() {
    let pool = pool(1);
    let lease = pool
        .lend("a".into(), PAGE, false, SECOND * 30)
        .expect("free");
    let is_orphan = || lease.ends_at() < Instant::now() + ORPHAN_TIME + SECOND;
    let (control, other) = (control(&lease).0, control(&lease).0);
    let (kept, given_up) = (control.number(), other.number());
    lease.renew(kept);
    lease.renew(given_up);
    lease.orphan(kept);
    assert!(!is_orphan(), "another had renewed it since");
    // The VM abandoned its later connection, whose end arrives late, and continues with the earlier
    // one.
    lease.renew(kept);
    lease.orphan(given_up);
    assert!(!is_orphan(), "the VM lives");
    lease.orphan(kept);
    assert!(is_orphan(), "the VM has ended");
    lease.renew(self::control(&lease).0.number());
    assert!(!is_orphan(), "it came again");
}

#[test]
fn a_vm_has_its_whole_grace_time_after_somebody_closed_its_connection() {
    let grace = SECOND * 60;
    let duration = lease_duration(grace);
    let pool = Pool::new(2 * PAGE, duration);
    let lend = |pages, or_less| pool.lend("a".into(), pages * PAGE, or_less, duration);
    let lease = lend(2, false).expect("free");
    let number = control(&lease).0.number();
    lease.renew(number);
    lease.orphan(number);
    let now = Instant::now();
    assert!(pool.end_expired(now + grace - SECOND).is_empty());
    lend(1, false).expect_err("its VM may come back");
    lease.renew(number);
    assert!(!lease.is_forsaken(now + grace), "it is back");
    assert_eq!(pool.leases(), 1);
    lease.orphan(number);
    assert_eq!(pool.end_expired(now + grace + SECOND), ["a"]);
}

#[test]
fn what_a_vm_left_behind_is_for_those_who_need_it() {
    let pool = Pool::new(4 * PAGE, SECOND * 120);
    let lend = |pages, or_less| pool.lend("a".into(), pages * PAGE, or_less, SECOND * 120);
    let left_behind = || {
        let lease = lend(2, false).expect("free");
        let number = control(&lease).0.number();
        lease.renew(number);
        lease.forsake(number);
        lease.token
    };
    let token = left_behind();
    assert_eq!(pool.free_bytes(), 4 * PAGE);
    let small = lend(1, false).expect("there is enough");
    assert_eq!(pool.free_bytes(), 3 * PAGE);
    lend(5, false).expect_err("it has no room for it ever");
    assert!(
        pool.with(&token, |_| ()).is_some(),
        "nobody needs its memory"
    );
    lend(4, false).expect_err("its memory would not be enough");
    assert!(pool.with(&token, |_| ()).is_some());
    let whole = lend(3, true).expect("all that is asked for");
    assert_eq!(whole.bytes(), 3 * PAGE);
    assert!(pool.with(&token, |_| ()).is_none());
    drop((small, whole));
    pool.end_all();
    let [first, second] = [left_behind(), left_behind()];
    lend(1, false).expect("that of the first one");
    let is_there = |token| pool.with(token, |_| ()).is_some();
    assert_eq!([&first, &second].map(is_there), [false, true]);
    pool.end_all();
    left_behind();
    lend(4, false).expect("the last one has ended");
    pool.end_all();
    left_behind();
    let reserved = pool.reserve(3 * PAGE);
    reserved.expect("for a process of a VM here, too");
}

#[test]
fn what_a_member_may_not_have_ends_no_lease_of_another() {
    let limits = Amounts {
        bytes: Some(2 * PAGE),
        leases: Some(1),
        ..Amounts::default()
    };
    let accounts = Accounts::new(vec![Rule {
        members: "vm/*".parse().expect("a pattern"),
        limits,
        gids: Vec::new(),
    }]);
    let pool = Pool::under_policy(4 * PAGE, SECOND * 120, Some(accounts));
    let duration = SECOND * 120;
    let lend = |who: &Subject| pool.lend_to(Some(who.clone()), "a".into(), PAGE, false, duration);
    let subject = |name| format!("spiffe://prod/ssi-hv/vm/{name}").parse();
    let [web, db]: [Subject; 2] = ["web", "db"].map(|name| subject(name).expect("one"));
    let forsaken = lend(&web).expect("one");
    let number = control(&forsaken).0.number();
    forsaken.renew(number);
    forsaken.forsake(number);
    let token = forsaken.token;
    drop(forsaken);
    lend(&db).expect("one");
    lend(&db).expect_err("two");
    assert!(pool.with(&token, |_| ()).is_some());
    pool.end_of(&db.holder);
    let most = pool.lend_to(Some(db.clone()), "a".into(), 4 * PAGE, true, duration);
    assert_eq!(most.expect("its own limit").bytes(), 2 * PAGE);
    assert!(pool.with(&token, |_| ()).is_some());
    lend(&web).expect("the other one is left behind");
    assert!(pool.with(&token, |_| ()).is_none());
}

/// A control connection of a lease, and its peer's end.
fn control(lease: &Lease) -> (Control, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (peer, _) = listener.accept().expect("connected");
    (lease.begin_control(Closer::Tcp(stream.into())), peer)
}

#[test]
fn a_lease_closes_its_oldest_control_connection_but_the_one_that_renews() {
    let pool = pool(1);
    let lease = pool.lend("a".into(), PAGE, false, SECOND).expect("free");
    let (first, first_peer) = control(&lease);
    lease.renew(first.number());
    let (second, second_peer) = control(&lease);
    let others = [control(&lease), control(&lease)];
    let is_closed = |mut peer: &TcpStream| {
        peer.set_nonblocking(true).expect("a socket");
        matches!(peer.read(&mut [0; 1]), Ok(0))
    };
    assert!(!is_closed(&second_peer), "4 are allowed");
    let fifth = control(&lease);
    assert!(is_closed(&second_peer), "the oldest that does not renew");
    assert!(!is_closed(&first_peer));
    // What has ended makes room.
    drop((second, others));
    lease.renew(fifth.0.number());
    let next = [control(&lease), control(&lease)];
    assert!(!is_closed(&first_peer), "4 again");
    let last = control(&lease);
    assert!(is_closed(&first_peer), "it does not renew any more");
    drop((first, next, last));
}
