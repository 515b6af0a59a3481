//! Processes that use the leases of a member: each has one certificate, which it has made itself,
//! and which the member has named here over a connection of its own.

use super::{Connection, Controlling, over};
use crate::control::{CONTROL_TIMEOUT, ControlError, ControlStream};
use crate::donor::buffers::Made;
use crate::donor::pool::Delegated;
use crate::donor::refuse::{refuse, refuse_malformed, refuse_unknown};
use crate::wire::{AttachRequest, DelegateRequest, FrameKind, Refusal, Token};
use fabric_identity::Fingerprint;

impl Connection<'_> {
    /// Delegates a lease of the member at the other end.
    pub(super) fn delegate(
        &self,
        mut control: ControlStream,
        request: DelegateRequest,
    ) -> Result<(), ControlError> {
        let (Some(by), Some(credentials)) = (control.member().cloned(), &self.served.credentials)
        else {
            let text = "this node does without certificates, and delegates no lease: who has its \
                        token can use it; start `ssi-hv node` with --credentials";
            return refuse(&mut control, Refusal::NotAllowed, text.to_owned());
        };
        let found = self
            .served
            .pool
            .find_for(&request.token, control.identity());
        let Some(lease) = found else {
            return refuse_unknown(&mut control);
        };
        // The lease keeps what the member has shown.
        let chain_bytes = by.chain.iter().map(|one| one.len()).sum();
        let share = match self.served.buffers.take(Made::Resting { chain_bytes }) {
            Ok(share) => share,
            Err(full) => return refuse(&mut control, Refusal::Busy, full.to_string()),
        };
        let to = credentials.delegates().admit(request.certificate.into());
        let delegated = lease.delegate(Delegated {
            to,
            by,
            _share: share,
        });
        if !delegated {
            return refuse_unknown(&mut control);
        }
        let status = lease.status();
        // It has no part in the lease while its peer reads the answer.
        drop(lease);
        control.send(FrameKind::Status, &status)
    }

    /// Serves a connection of a process to which leases are delegated. It can resume them and
    /// attach to them, and nothing else.
    pub(super) fn serve_delegate(
        &self,
        mut control: ControlStream,
        certificate: Fingerprint,
    ) -> Result<Option<Controlling>, ControlError> {
        let (frame, payload) = match control.receive(CONTROL_TIMEOUT) {
            Ok(received) => received,
            Err(error) => return refuse_malformed(&mut control, error).map(over),
        };
        let decoded = match frame.kind {
            FrameKind::Resume => control
                .decode(frame.kind, &payload)
                .map(|token| (token, None)),
            FrameKind::Attach => control
                .decode(frame.kind, &payload)
                .map(|request: AttachRequest| (request.token, Some(request))),
            kind => {
                let text = format!(
                    "{kind:?} is for members of the cluster; a process to which a lease is \
                     delegated resumes that, and attaches connections to it"
                );
                return refuse(&mut control, Refusal::NotAllowed, text).map(over);
            }
        };
        let (token, attaching): (Token, _) = match decoded {
            Ok(decoded) => decoded,
            Err(error) => return refuse_malformed(&mut control, error).map(over),
        };
        let pool = &self.served.pool;
        let Some((lease, owner)) = pool.find_delegated(&token, certificate) else {
            return refuse_unknown(&mut control).map(over);
        };
        // In this order: what ends those of the owner finds this one from now on.
        if let Err(why) = self.place.belongs_to(&owner) {
            let text = format!(
                "the certificate with which {} has delegated the lease is not accepted any more \
                 ({why}); the VM delegates it again when it has another one",
                owner.subject
            );
            return refuse(&mut control, Refusal::NotAllowed, text).map(over);
        }
        let charged = match pool.admit(Some(&owner.subject)) {
            Ok(charged) => charged,
            Err(denied) => {
                let text = denied.to_string();
                return refuse(&mut control, Refusal::NotAllowed, text).map(over);
            }
        };
        let user = Some(certificate);
        match attaching {
            None => self.resume(control, lease, user, charged),
            Some(request) => {
                let served = self.attach(control, request, lease, user);
                drop(charged);
                served.map(over)
            }
        }
    }
}
