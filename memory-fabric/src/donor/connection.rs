//! One connection to a donor: its purpose, and the control of a lease.

mod delegates;

use super::buffers::Buffers;
use super::places::{Place, Purpose};
use super::policy::Charge;
use super::pool::{Control, Lease, LeaseError, Pool, SessionKind};
use super::refuse::{refuse, refuse_malformed, refuse_session, refuse_unknown};
use super::{CpuLender, TAKE_OVER_TIMEOUT, rdma, session};
use crate::control::{CONTROL_TIMEOUT, ControlError, ControlStream, is_of_tls};
use crate::link::describe;
use crate::stream::Stream;
use crate::transport::rdma::Settings;
use crate::transport::rdma::resources::Share;
use crate::wire::{
    AttachRequest, Attached, FrameKind, LeaseGrant, LeaseRequest, RENEWAL_INTERVAL_MAX, Refusal,
    Token, VM_NAME_BYTES_MAX, WireError,
};
use fabric_host::Seldom;
use fabric_identity::{Fingerprint, Role, SharedCredentials};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Clients can obtain and release leases in a loop.
static LENT: Seldom = Seldom::notices();
static RETURNED: Seldom = Seldom::notices();

/// Silence of a control connection after which its VM is asked whether it is there: twice the time
/// between renewals.
const OVERDUE_AFTER: Duration = RENEWAL_INTERVAL_MAX.saturating_mul(2);

/// State that the connections of a donor share.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) pool: Arc<Pool>,
    /// How long a connection polls for its next request.
    pub(super) spin: Duration,
    pub(super) rdma: Settings,
    pub(super) rdma_connections: rdma::Connections,
    pub(super) buffers: Buffers,
    /// What this node shows; `None` without certificates.
    pub(super) credentials: Option<Arc<SharedCredentials>>,
    /// `None` when it lends memory only.
    pub(super) cpus: Option<Arc<dyn CpuLender>>,
}

/// The control connection of a lease.
#[derive(Debug)]
pub(super) struct Controlling {
    pub(super) control: ControlStream,
    pub(super) of: Controlled,
}

/// What a control connection is of.
#[derive(Debug)]
pub(super) struct Controlled {
    pub(super) token: Token,
    /// The connection among those of its lease.
    pub(super) among: Control,
    /// What its member is charged with.
    pub(super) _charged: Option<Charge>,
}

impl Controlled {
    /// Notes that the peer has closed the connection, or that it broke.
    pub(super) fn orphan(&self, pool: &Pool, cause: &io::Error) {
        // The VM's kernel closed the connection: that is no timeout, nor that it does not read its
        // answers, nor what fails under TLS, which a third party can cause.
        let kinds = [io::ErrorKind::TimedOut, io::ErrorKind::WriteZero];
        if !kinds.contains(&cause.kind())
            && !is_of_tls(cause)
            && let Some(lease) = pool.find(&self.token)
        {
            lease.orphan(self.among.number());
        }
    }
}

/// One connection, until its first frame determines its purpose.
pub(super) struct Connection<'a> {
    pub(super) served: &'a Served,
    pub(super) peer: SocketAddr,
    pub(super) place: &'a dyn Place,
}

impl Connection<'_> {
    /// Serves the connection, until it ends or has become the control connection of a lease. With
    /// `delegate`, the peer is no member, but the process with this certificate.
    pub(super) fn serve(
        &self,
        stream: Stream,
        delegate: Option<Fingerprint>,
    ) -> Result<Option<Controlling>, ControlError> {
        let mut control = ControlStream::accepted(stream, self.peer);
        if let Some(certificate) = delegate {
            return self.serve_delegate(control, certificate);
        }
        // Its request is read before it is refused: closing a socket with unread data would reset
        // the connection before the peer has read why.
        let admitted = self.served.pool.admit(control.identity());
        let (frame, payload) = match control.receive(CONTROL_TIMEOUT) {
            Ok(received) => received,
            Err(error) => return refuse_malformed(&mut control, error).map(over),
        };
        if let Some(subject) = control.identity()
            && subject.holder.role == Role::Operator
        {
            let text = format!("{subject} is no VM or node, and uses no memory");
            return refuse(&mut control, Refusal::Malformed, text).map(over);
        }
        let charged = match admitted {
            Ok(charged) => charged,
            Err(denied) => {
                let text = denied.to_string();
                return refuse(&mut control, Refusal::NotAllowed, text).map(over);
            }
        };
        let served = match frame.kind {
            FrameKind::Lease => match control.decode(frame.kind, &payload) {
                Ok(request) => return self.lease(control, request, charged),
                Err(error) => refuse_malformed(&mut control, error),
            },
            FrameKind::Resume => match control.decode::<Token>(frame.kind, &payload) {
                Ok(token) => match self.served.pool.find_for(&token, control.identity()) {
                    Some(lease) => return self.resume(control, lease, None, charged),
                    None => refuse_unknown(&mut control),
                },
                Err(error) => refuse_malformed(&mut control, error),
            },
            FrameKind::Attach => match control.decode::<AttachRequest>(frame.kind, &payload) {
                Ok(asked) => match self.served.pool.find_for(&asked.token, control.identity()) {
                    Some(lease) => self.attach(control, asked, lease, None),
                    None => refuse_unknown(&mut control),
                },
                Err(error) => refuse_malformed(&mut control, error),
            },
            FrameKind::Delegate => match control.decode(frame.kind, &payload) {
                Ok(request) => self.delegate(control, request),
                Err(error) => refuse_malformed(&mut control, error),
            },
            FrameKind::Compute => match control.decode(frame.kind, &payload) {
                Ok(request) => self.compute(control, request),
                Err(error) => refuse_malformed(&mut control, error),
            },
            FrameKind::ReadClock => self.clock(control),
            FrameKind::Connect => match control.decode(frame.kind, &payload) {
                Ok(request) => {
                    let served = self.served;
                    let (pool, connections) = (&served.pool, &served.rdma_connections);
                    let place = self.place;
                    rdma::serve(pool, &served.rdma, connections, place, control, &request)
                }
                Err(error) => refuse_malformed(&mut control, error),
            },
            other => {
                let error = ControlError::Protocol(self.peer, WireError::Unexpected(other));
                refuse_malformed(&mut control, error)
            }
        };
        served.map(over)
    }

    fn lease(
        &self,
        mut control: ControlStream,
        request: LeaseRequest,
        charged: Option<Charge>,
    ) -> Result<Option<Controlling>, ControlError> {
        if request.vm.len() > VM_NAME_BYTES_MAX {
            let bytes = request.vm.len();
            let text = format!("VM name of {bytes} bytes, {VM_NAME_BYTES_MAX} is the limit");
            return refuse(&mut control, Refusal::Malformed, text).map(over);
        }
        // What follows may take long: memory of others is unmapped. Those who only show what they have
        // do not wait for that.
        if let Err(full) = self.place.establish(purpose(&control)) {
            return refuse(&mut control, Refusal::Busy, full.to_string()).map(over);
        }
        let owner = control.identity().cloned();
        // It is logged.
        let vm: String = request.vm.chars().filter(|c| !c.is_control()).collect();
        let duration = Duration::from_millis(request.duration_ms.into());
        let lent = self
            .served
            .pool
            .lend_to(owner, vm, request.bytes, request.or_less, duration);
        let lease = match lent {
            Ok(lease) => lease,
            Err(error) => {
                let refusal = match &error {
                    LeaseError::Size(_) => Refusal::Malformed,
                    LeaseError::TooMany => Refusal::Busy,
                    LeaseError::Denied(_) => Refusal::NotAllowed,
                    LeaseError::NoMemory { .. } | LeaseError::System(_) => Refusal::NoMemory,
                };
                return refuse(&mut control, refusal, error.to_string()).map(over);
            }
        };
        let token = lease.token;
        let (peer, bytes) = (self.peer, lease.bytes());
        match LENT.pass(Instant::now()) {
            Some(unreported) => {
                tracing::info!(%peer, vm = lease.vm, bytes, unreported, "memory lent");
            }
            None => tracing::debug!(%peer, vm = lease.vm, bytes, "memory lent"),
        }
        let grant = LeaseGrant {
            token,
            bytes: lease.bytes(),
            duration_ms: u32::try_from(lease.duration.as_millis()).unwrap_or(u32::MAX),
        };
        let among = lease.begin_control(control.closer());
        lease.begin(among.number());
        drop(lease);
        if let Err(error) = control.send(FrameKind::Granted, &grant) {
            // The client has not received the token, so the lease cannot be used.
            self.served.pool.end(&token);
            return Err(error);
        }
        let of = Controlled {
            token,
            among,
            _charged: charged,
        };
        Ok(Some(Controlling { control, of }))
    }

    /// Resumes a lease on a new control connection: of its owner, or of the process with the
    /// certificate `delegate`.
    fn resume(
        &self,
        mut control: ControlStream,
        lease: Arc<Lease>,
        delegate: Option<Fingerprint>,
        charged: Option<Charge>,
    ) -> Result<Option<Controlling>, ControlError> {
        let token = lease.token;
        if let Err(full) = self.place.establish(purpose(&control)) {
            return refuse(&mut control, Refusal::Busy, full.to_string()).map(over);
        }
        let among = lease.begin_control(control.closer());
        if !may_use(&lease, delegate) {
            return refuse_unknown(&mut control).map(over);
        }
        drop(lease);
        if !self.answer_status(&mut control, &token, among.number(), FrameKind::Renew)? {
            return Ok(None);
        }
        let of = Controlled {
            token,
            among,
            _charged: charged,
        };
        Ok(Some(Controlling { control, of }))
    }

    /// Serves the next request of a control connection that did not come to rest, and then those
    /// after it. When the connection breaks, the lease continues until it expires. `timeout` is
    /// that of the next request; without one the connection may be as silent as between renewals.
    pub(super) fn keep(
        &self,
        controlling: Controlling,
        timeout: Option<Duration>,
    ) -> Result<(), ControlError> {
        let Controlling { mut control, of } = controlling;
        let (token, number) = (of.token, of.among.number());
        let mut timeout = timeout;
        loop {
            let next = timeout.take();
            if next.is_none() {
                if let Err(full) = self.place.stay() {
                    return refuse(&mut control, Refusal::Busy, full.to_string());
                }
                control.ask_if_silent(OVERDUE_AFTER);
            }
            // A control connection is silent between renewals; one that is silent for longer than
            // any lease lasts has lost its peer.
            let longest = self
                .served
                .pool
                .find(&token)
                .map(|lease| lease.duration * 2);
            let received = control.receive(next.or(longest).unwrap_or(CONTROL_TIMEOUT));
            let (frame, payload) = match received {
                Ok(received) => received,
                Err(error) => {
                    if let ControlError::Stream(_, cause) = &error {
                        of.orphan(&self.served.pool, cause);
                    }
                    return Err(error);
                }
            };
            if !matches!(frame.kind, FrameKind::Renew | FrameKind::Release) {
                let error = ControlError::Protocol(self.peer, WireError::Unexpected(frame.kind));
                return refuse_malformed(&mut control, error);
            }
            match control.decode::<Token>(frame.kind, &payload) {
                Ok(shown) if shown == token => {}
                Ok(_) => {
                    let text = "not the lease of this connection".to_owned();
                    return refuse(&mut control, Refusal::UnknownLease, text);
                }
                Err(error) => return refuse_malformed(&mut control, error),
            }
            if !self.answer_status(&mut control, &token, number, frame.kind)?
                || frame.kind == FrameKind::Release
            {
                return Ok(());
            }
        }
    }

    /// Renews or ends a lease on its control connection `number` and sends its counters; sends a
    /// refusal and returns false if there is no such lease.
    fn answer_status(
        &self,
        control: &mut ControlStream,
        token: &Token,
        number: u64,
        kind: FrameKind,
    ) -> Result<bool, ControlError> {
        let pool = &self.served.pool;
        let status = if kind == FrameKind::Release {
            let vm = pool.find(token).map(|lease| lease.vm.clone());
            pool.end(token).inspect(|status| {
                let vm = vm.unwrap_or_default();
                match RETURNED.pass(Instant::now()) {
                    Some(unreported) => tracing::info!(vm, ?status, unreported, "memory returned"),
                    None => tracing::debug!(vm, ?status, "memory returned"),
                }
            })
        } else {
            pool.find(token).map(|lease| {
                lease.renew(number);
                lease.status()
            })
        };
        match status {
            Some(status) => control.send(FrameKind::Status, &status).map(|()| true),
            None => refuse_unknown(control).map(|()| false),
        }
    }

    /// Serves pages to the owner of a lease, or to the process with the certificate `delegate`.
    fn attach(
        &self,
        mut control: ControlStream,
        request: AttachRequest,
        lease: Arc<Lease>,
        delegate: Option<Fingerprint>,
    ) -> Result<(), ControlError> {
        let (class, epoch) = (request.class, request.epoch);
        if let Err(full) = self.place.establish(Purpose::Lasting) {
            return refuse(&mut control, Refusal::Busy, full.to_string());
        }
        let mut stream = control.into_stream();
        let kind = SessionKind::Pages(class);
        let begun = lease.begin_session(kind, stream.closer(), epoch, TAKE_OVER_TIMEOUT);
        if let Err(error) = begun {
            let mut control = ControlStream::accepted(stream, self.peer);
            return refuse_session(&mut control, class, &error);
        }
        if !may_use(&lease, delegate) {
            lease.end_session(kind, epoch);
            let mut control = ControlStream::accepted(stream, self.peer);
            return refuse_unknown(&mut control);
        }
        // A connection that this one replaces has returned its share by now.
        let lifted = stream.lifted_bytes(class);
        let share = match self.served.buffers.take_for_pages(class, lifted) {
            Ok(share) => share,
            Err(full) => {
                lease.end_session(kind, epoch);
                let mut control = ControlStream::accepted(stream, self.peer);
                return refuse(&mut control, Refusal::Busy, full.to_string());
            }
        };
        stream.lift_limits(class);
        let mut control = ControlStream::accepted(stream, self.peer);
        let mut attached = Attached::new(&request);
        let served = control.send_stamped(FrameKind::Attached, &(), attached.accepted());
        let mut stream = control.into_stream();
        if served.is_ok() {
            let (spin, attached) = (self.served.spin, &mut attached);
            if let Err(error) = session::serve(&lease, &mut stream, class, attached, spin) {
                tracing::debug!(peer = %self.peer, error = describe(&error), "session ended");
            }
        }
        drop(stream);
        drop::<Share>(share);
        lease.end_session(kind, attached.newest_epoch());
        served
    }
}

/// Returns whether the lease is still delegated to the process with this certificate, or is used by
/// its owner. A connection that has begun is closed when that changes.
fn may_use(lease: &Lease, delegate: Option<Fingerprint>) -> bool {
    delegate.is_none_or(|certificate| lease.delegated_to(certificate).is_some())
}

/// Returns what a control connection is for: by UDP it cannot rest.
fn purpose(control: &ControlStream) -> Purpose {
    if control.is_udp() {
        Purpose::Lasting
    } else {
        Purpose::Control
    }
}

/// The connection has been served.
const fn over((): ()) -> Option<Controlling> {
    None
}

#[cfg(test)]
mod tests;
