//! A flow of an association: the control frames that it owes the peer, and by which carrier each of them goes.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
};

use vtl_proto::frame::{self, CarrierId, FlowId, Frame, ResetCode, Run};

use super::{Carrier, hearing::Hearing};
use crate::flow::{Flow, Loses, Violation};

/// Maximum size of one flow's control frames in a row, bytes.
const MAX_FLOW_CONTROL: usize = 5 * frame::MAX_CONTROL;

/// Carriers by which a state has been sent to the peer: once by each.
type CarrierSet = BTreeSet<CarrierId>;

/// A flow, and what the peer has been told of it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) flow: Flow,
    /// Its share of [`Association::memory`], bytes.
    pub(super) memory: u64,
    /// The carrier by which a chunk of this flow arrived last.
    heard: Hearing,
    confirm_by: Option<CarrierId>,
    attach: Option<Run>,
    attach_told: CarrierSet,
    pub(super) attached: Option<u32>,
    attached_told: CarrierSet,
    fin_told: CarrierSet,
    loses: Option<Loses>,
    loses_told: CarrierSet,
    pub(super) reset: Option<ResetCode>,
    reset_told: CarrierSet,
    /// Chunks of a refused flow were discarded: REJECT is due.
    pub(super) rejects: bool,
}

impl Entry {
    pub(super) fn new(window: u64, max_window: u64) -> Self {
        Self {
            flow: Flow::new(window, max_window),
            memory: 0,
            heard: Hearing::default(),
            confirm_by: None,
            attach: None,
            attach_told: CarrierSet::default(),
            attached: None,
            attached_told: CarrierSet::default(),
            fin_told: CarrierSet::default(),
            loses: None,
            loses_told: CarrierSet::default(),
            reset: None,
            reset_told: CarrierSet::default(),
            rejects: false,
        }
    }

    /// Handles a frame of this flow that arrived by a carrier.
    pub(super) fn handle_frame(
        &mut self,
        carrier: CarrierId,
        carriers: &BTreeMap<CarrierId, Carrier>,
        frame: Frame<'_>,
    ) -> Result<(), Violation> {
        match frame {
            Frame::Chunk { .. } if self.flow.is_refused() => {
                self.rejects = true;
                Ok(())
            }
            Frame::Reset { code, .. } => {
                self.flow.reset(code);
                Ok(())
            }
            // Treated as an unknown flow.
            _ if self.flow.is_refused() => Ok(()),
            Frame::Chunk {
                offset,
                bytes,
                fin,
                urgent,
                ..
            } => {
                let result = self.chunk(offset, bytes, fin, urgent);
                self.note_overtaken(carrier, offset, carriers);
                result
            }
            Frame::Confirm {
                offset,
                fin,
                limit,
                tolerant,
                ..
            } => {
                if !self.flow.send.is_known() {
                    // The peer has ignored earlier ones.
                    self.attach_told = CarrierSet::default();
                    self.fin_told = CarrierSet::default();
                }
                self.flow.send.confirmed(offset, fin, limit, tolerant)
            }
            Frame::Loses { from, passed, .. } => self.flow.receive.loses(from, passed),
            Frame::Attach { run, .. } => {
                let result = self.flow.receive.attach(run);
                if self.attached.is_none_or(|number| number < run.number) {
                    self.attached = Some(run.number);
                    self.attached_told = CarrierSet::default();
                }
                // Answer by the carrier of the ATTACH, which is alive.
                self.attached_told.remove(&carrier);
                result
            }
            Frame::Attached { number, .. } => {
                self.flow.send.attached(number);
                Ok(())
            }
            Frame::Reject { .. } => {
                self.flow.send.reject();
                Ok(())
            }
            // Carriers' frames.
            _ => Ok(()),
        }
    }

    pub(super) fn chunk(
        &mut self,
        offset: u64,
        bytes: &[u8],
        fin: bool,
        urgent: bool,
    ) -> Result<(), Violation> {
        let receive = &mut self.flow.receive;
        receive.chunk(offset, bytes, fin)?;
        if urgent {
            receive.note_urgent(offset + bytes.len() as u64);
        }
        Ok(())
    }

    /// Notes the carrier of a chunk. A CONFIRM that has gone by another one than the next will is said once more.
    pub(super) fn note_heard(
        &mut self,
        now_ns: u64,
        carrier: CarrierId,
        len: usize,
        is_spread: bool,
    ) {
        let is_other = self.heard.note(now_ns, carrier, len as u64, is_spread);
        let before = self.confirm_by.filter(|before| *before != carrier);
        if is_other && is_spread && before.is_some() {
            self.confirm_by = None;
            self.flow.receive.confirm_lost();
        }
    }

    /// Carrier for CONFIRM: the one by which the peer was last heard if it is reliable, or else any.
    pub(super) fn confirms_by(&self, carriers: &BTreeMap<CarrierId, Carrier>) -> Option<CarrierId> {
        let mut reliable = carriers.iter().filter(|(_, carrier)| !carrier.loses);
        self.heard
            .by()
            .filter(|id| carriers.get(id).is_some_and(|carrier| !carrier.loses))
            .or_else(|| reliable.next().map(|(id, _)| *id))
    }

    /// Counts a chunk of an unreliable carrier, at this offset, if it has overtaken a gap.
    pub(super) fn note_overtaken(
        &mut self,
        carrier: CarrierId,
        offset: u64,
        carriers: &BTreeMap<CarrierId, Carrier>,
    ) {
        if carriers.get(&carrier).is_some_and(|carrier| carrier.loses) {
            self.flow.receive.note_overtaken(offset);
        }
    }

    /// Updates the run and the losses to be sent to the peer.
    pub(super) fn look_at_states(&mut self) {
        if self.attach != self.flow.send.asked() {
            self.attach = self.flow.send.asked();
            self.attach_told.clear();
        }
        if self.loses != self.flow.send.loses() {
            self.loses = self.flow.send.loses();
            self.loses_told.clear();
        }
    }

    /// Whether a control frame is due by `carrier`.
    pub(super) fn owes(&self, carrier: CarrierId, confirms_by: Option<CarrierId>) -> bool {
        let untold = |told: &CarrierSet| !told.contains(&carrier);
        if self.reset.is_some() {
            return untold(&self.reset_told);
        }
        if self.flow.is_refused() {
            return self.rejects && confirms_by == Some(carrier);
        }
        (self.attach.is_some() && untold(&self.attach_told))
            || (self.attached.is_some() && untold(&self.attached_told))
            || (self.flow.send.owes_fin().is_some() && untold(&self.fin_told))
            || (self.loses.is_some() && untold(&self.loses_told))
            || (confirms_by == Some(carrier) && self.flow.receive.owes_confirm().is_some())
    }

    /// Writes the control frames due by `carrier`, at most [`MAX_FLOW_CONTROL`] bytes.
    pub(super) fn poll_control(
        &mut self,
        flow: FlowId,
        carrier: CarrierId,
        confirms_by: Option<CarrierId>,
        out: &mut Out<'_>,
    ) {
        if let Some(code) = self.reset {
            if self.reset_told.insert(carrier) {
                out.push(Frame::Reset { flow, code });
            }
            return;
        }
        if self.flow.is_refused() {
            if confirms_by == Some(carrier) && mem::take(&mut self.rejects) {
                out.push(Frame::Reject { flow });
            }
            return;
        }
        self.look_at_states();
        if let Some(Loses { from, passed }) = self.loses
            && self.loses_told.insert(carrier)
        {
            out.push(Frame::Loses { flow, from, passed });
        }
        if let Some(run) = self.attach
            && self.attach_told.insert(carrier)
        {
            out.push(Frame::Attach { flow, run });
        }
        if let Some(number) = self.attached
            && self.attached_told.insert(carrier)
        {
            out.push(Frame::Attached { flow, number });
        }
        if let Some(offset) = self.flow.send.owes_fin()
            && self.fin_told.insert(carrier)
        {
            out.push(Frame::Chunk {
                flow,
                offset,
                bytes: &[],
                fin: true,
                urgent: false,
            });
        }
        if confirms_by == Some(carrier)
            && let Some(confirm) = self.flow.receive.owes_confirm()
        {
            let (offset, fin, limit) = confirm;
            out.push(Frame::Confirm {
                flow,
                offset,
                fin,
                limit,
                tolerant: self.flow.receive.is_tolerant(),
            });
            self.flow.receive.confirm_sent(confirm);
            self.confirm_by = Some(carrier);
        }
    }

    /// Marks states sent by a broken carrier as unsent; carrier numbers are not reused.
    pub(super) fn carrier_broken(&mut self, id: CarrierId) {
        if self.confirm_by.take_if(|by| *by == id).is_some() {
            self.flow.receive.confirm_lost();
        }
        self.heard.broken(id);
        for told in [
            &mut self.attach_told,
            &mut self.attached_told,
            &mut self.fin_told,
            &mut self.loses_told,
            &mut self.reset_told,
        ] {
            told.remove(&id);
        }
    }
}

/// Writer of consecutive frames.
pub(super) struct Out<'a> {
    pub(super) buffer: &'a mut [u8],
    pub(super) used: usize,
}

impl Out<'_> {
    pub(super) fn has_room(&self) -> bool {
        self.buffer.len() - self.used >= MAX_FLOW_CONTROL
    }

    pub(super) fn push(&mut self, frame: Frame<'_>) {
        self.used += frame.emit(&mut self.buffer[self.used..]).unwrap_or(0);
    }
}
