//! Attempts to use a lease after its end.

use super::*;

#[test]
fn a_lease_that_ended_is_of_no_more_use() {
    let donor = donor(MIB);
    let (mut control, grant) = lease(donor.address(), MIB);
    let mut stream = attach(donor.address(), grant.token)
        .expect("attached")
        .into_tcp()
        .expect("TCP");
    let _: LeaseStatus = control
        .call(FrameKind::Release, &grant.token, FrameKind::Status)
        .expect("released");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let _ = stream.write_all(&frame(FrameKind::ReadPage, 7, 0, false).encode(&[]));
    let got = stream.read(&mut [0; PAGE_SIZE]);
    assert!(matches!(got, Ok(0) | Err(_)), "{got:?}");
    assert_eq!(
        refused(attach(donor.address(), grant.token)),
        Refusal::UnknownLease
    );
    assert_eq!(donor.pool().lent_bytes(), 0);
}

#[test]
fn a_vm_that_stops_renewing_loses_its_lease() {
    let donor = donor(MIB);
    // A lease can end before a client that has to wait for a CPU attaches to it.
    let attached = (0..10).find_map(|_| {
        let (control, grant) = lease_for(donor.address(), MIB, 1);
        assert_eq!(grant.duration_ms, 1000, "the shortest there is");
        let stream = attach(donor.address(), grant.token).ok()?;
        Some((control, grant, stream.into_tcp().expect("TCP")))
    });
    let (_control, grant, mut stream) = attached.expect("attached");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    // The donor ends the connection when the lease ends.
    assert!(matches!(stream.read(&mut [0; 16]), Ok(0) | Err(_)));
    assert_eq!(
        refused(attach(donor.address(), grant.token)),
        Refusal::UnknownLease
    );
}

#[test]
fn a_lease_whose_vm_is_killed_ends_soon() {
    let donor = donor(MIB);
    let (control, grant) = lease_for(donor.address(), MIB, 25_000);
    let mut pages = attach(donor.address(), grant.token)
        .expect("attached")
        .into_tcp()
        .expect("TCP");
    let started = Instant::now();
    drop(control);
    // The end of the lease ends this connection.
    pages.set_read_timeout(Some(PATIENCE)).expect("a socket");
    assert!(matches!(pages.read(&mut [0; 16]), Ok(0) | Err(_)));
    assert!(
        started.elapsed() < Duration::from_secs(22),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(
        refused(attach(donor.address(), grant.token)),
        Refusal::UnknownLease
    );
}

#[test]
fn the_late_end_of_a_replaced_control_connection_ends_no_lease() {
    let donor = donor(MIB);
    let (old, grant) = lease_for(donor.address(), MIB, 25_000);
    let mut pages = attach(donor.address(), grant.token)
        .expect("attached")
        .into_tcp()
        .expect("TCP");
    let mut new = ControlStream::connect(donor.address()).expect("a donor");
    let _: LeaseStatus = new
        .call(FrameKind::Resume, &grant.token, FrameKind::Status)
        .expect("resumed");
    drop(old);
    // Longer than an orphaned lease lasts: the connection must stay open for that time.
    pages
        .set_read_timeout(Some(ORPHAN_TIME + Duration::from_secs(1)))
        .expect("a socket");
    let silence = pages
        .read(&mut [0; 16])
        .expect_err("nothing comes, and nothing ends");
    assert_eq!(silence.kind(), std::io::ErrorKind::WouldBlock);
    let _: LeaseStatus = new
        .call(FrameKind::Renew, &grant.token, FrameKind::Status)
        .expect("renewed");
}
