use super::*;
use crate::stream::Closer;
use crate::wire::ORPHAN_TIME;
use fabric_transport::tls::TlsError;
use std::net::{TcpListener, TcpStream};

#[test]
fn a_lease_becomes_an_orphan_by_what_its_vm_does_alone() {
    let pool = Pool::new(4096, Duration::from_secs(30));
    let lease = pool.lend("vm".into(), 4096, false, Duration::from_secs(30));
    let lease = lease.expect("free");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let of = Controlled {
        token: lease.token,
        among: lease.begin_control(Closer::Tcp(stream.into())),
        _charged: None,
    };
    lease.renew(of.among.number());
    let is_orphan = |cause: io::Error| {
        of.orphan(&pool, &cause);
        lease.ends_at() < Instant::now() + ORPHAN_TIME + Duration::from_secs(1)
    };
    for (what, cause) in [
        ("a pause", io::ErrorKind::TimedOut.into()),
        ("answers that are not read", io::ErrorKind::WriteZero.into()),
        ("a record of a third party", TlsError::Long.into()),
        ("a truncated handshake", TlsError::Closed.into()),
    ] {
        assert!(!is_orphan(cause), "{what}");
    }
    assert!(is_orphan(io::ErrorKind::UnexpectedEof.into()), "its end");
}
